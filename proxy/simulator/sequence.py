"""One request inside the engine, and what it asked for."""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from proxy.simulator.prefix_cache import Block, chain_hashes, chain_seed, kv_name
from proxy.simulator.slots import LoraRef
from proxy.simulator.weights import BASE, CHUNK, chunk_logprobs, chunk_tokens, output_state


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt and one continuation (``n`` choices are ``n`` of these).

    ``watch``: every token is an event, for streams; otherwise only the end is.
    """

    id: str
    prompt: Tokens[int]
    max_tokens: int = 16
    lora: LoraRef | None = None
    cache_salt: str | None = None
    seed: int = 0
    watch: bool = False
    end_reason: str = "length"
    """Why it ends at ``max_tokens``."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of a request. Times are the engine's, in seconds; ``produced`` counts output tokens."""

    request: EngineRequest
    arrived: float
    weights: str = BASE
    produced: int = 0
    computed: int = 0
    """Tokens (prompt, then output) whose KV is there."""
    cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache when it was first scheduled."""
    finish_reason: str | None = None
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    blocks: list[Block] = field(default_factory=list)
    blanks: int = 0
    hashes: list[bytes] = field(default_factory=list)
    _output: list[int] = field(default_factory=list)
    _states: list[tuple[int, bytes]] = field(default_factory=list)
    """From which output position on which state gave the tokens."""
    _kv: str = ""

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.request.prompt) + self.produced

    @property
    def remaining(self) -> int:
        """Output tokens still to come."""
        return self.request.max_tokens - self.produced

    @property
    def output(self) -> list[int]:
        """The output tokens so far."""
        return self.tokens(0, self.produced)

    def tokens(self, start: int, end: int) -> list[int]:
        """Output tokens at positions start..end-1 (end at most ``produced``)."""
        self._generate(end)
        return self._output[start:end]

    def logprobs(self, start: int, end: int) -> list[float]:
        """Log-probabilities of ``tokens(start, end)``."""
        values: list[float] = []
        for index, (since, state) in enumerate(self._states):
            upto = self._states[index + 1][0] if index + 1 < len(self._states) else end
            first, last = max(start, since), min(end, upto)
            if first < last:
                chunks = range(first // CHUNK, -(-last // CHUNK))
                drawn = [value for chunk in chunks for value in chunk_logprobs(state, chunk)]
                values += drawn[first % CHUNK :][: last - first]
        return values

    def hash_blocks(self, block_size: int, upto: int) -> None:
        """Bring ``hashes`` up to the full blocks of the first ``upto`` tokens (at most ``length``)."""
        have = len(self.hashes)
        if upto // block_size <= have:
            return
        start = have * block_size
        prompt = self.request.prompt
        tokens = list(prompt[start:upto])
        if upto > len(prompt):
            self._generate(upto - len(prompt))
            tokens += self._output[max(0, start - len(prompt)) : upto - len(prompt)]
        lora = self.request.lora
        parent = self.hashes[-1] if have else chain_seed(lora.name if lora else None, self.request.cache_salt)
        self.hashes += chain_hashes(parent, tokens, block_size)

    def settle(self) -> None:
        """Fix what the coming tokens depend on: the weights, and the KV they will be computed on."""
        kv = kv_name(self.weights, self.blocks[-1] if self.blocks else None)
        if kv != self._kv:
            # Tokens already given stay; those generated ahead were for other weights.
            self._generate(self.produced)
            self._kv = kv
            self._states.append((self.produced, output_state(kv, self.request.prompt, self.request.seed)))
            del self._output[self.produced :]

    def _generate(self, count: int) -> None:
        while len(self._output) < count:
            chunk, skip = divmod(len(self._output), CHUNK)
            self._output += chunk_tokens(self._states[-1][1], chunk)[skip:]
