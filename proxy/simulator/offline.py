"""A fleet of simulated engines behind a router, on a virtual clock: nothing waits, nothing is random.

The router is the proxy's own, told of every request what the proxy would tell it; the engines are those of simulated
replicas. So a policy can be tried on any traffic, at the speed of the computer.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from xxhash import xxh3_64_intdigest

from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import RouteRequest
from proxy.routing.router import Decision, Router
from proxy.simulator.engine import Engine, EngineConfig
from proxy.simulator.prefix_cache import chain_hashes, chain_seed
from proxy.simulator.sequence import EngineRequest
from proxy.simulator.sequence import Sequence as EngineSequence
from proxy.simulator.slots import LoraRef


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """A prompt. Equal prompts should be one object: what is derived from it is then derived once."""

    ids: "array[int]"

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `outputs[i * n + j]` is how many tokens the j-th answer to the i-th prompt has (at least 1).

    `model` is what the router and the engine's cache go by, `adapter` whether it is one. Answer k is drawn with seed
    `seed + k`, so that it does not depend on which replica gives it.
    """

    model: str
    adapter: bool
    prompts: tuple[TokenIds, ...]
    outputs: tuple[int, ...]
    n: int = 1
    max_tokens: int | None = None
    salt: str = ""
    seed: int = 0

    @property
    def longest(self) -> int:
        """KV tokens that its largest sequence needs."""
        return max(len(self.prompts[at // self.n]) + out for at, out in enumerate(self.outputs))


@dataclass(slots=True, eq=False)
class Flight:
    """A call on its replica. Times are virtual seconds; `first_token` is that of its quickest sequence."""

    call: Call
    sent: float
    decision: Decision
    sequences: list[EngineSequence]
    running: int
    finished: float = 0.0

    @property
    def first_token(self) -> float:
        return min(sequence.first_token or self.finished for sequence in self.sequences)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.call.prompts)

    @property
    def cached_tokens(self) -> int:
        """Of the prompts' tokens; the first sequence of each prompt counts."""
        return sum(sequence.cached_tokens or 0 for sequence in self.sequences[:: self.call.n])


@dataclass(slots=True)
class Tally:
    """What a run came to: tokens, requests a replica, seconds. `endless` is what one cache without end would reuse."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    endless: int = 0
    shares: list[int] = field(default_factory=list)
    first_token_secs: float = 0.0
    """Of all requests together."""
    wall_secs: float = 0.0

    @property
    def reuse(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def of_endless(self) -> float:
        return self.cached_tokens / self.endless if self.endless else 1.0

    @property
    def balance(self) -> float:
        """The largest share of the requests over the mean one."""
        return max(self.shares, default=0) * len(self.shares) / self.requests if self.requests else 1.0


class EndlessCache:
    """One prefix cache that never evicts, shared by all: the most that could be reused of calls in this order."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: set[bytes] = set()

    def ask(self, call: Call) -> int:
        """Prompt tokens that would come from the cache; the prompts are in it from now on."""
        return sum(self._ask(call, prompt.ids) for prompt in call.prompts)

    def learn(self, call: Call, tokens: Sequence[int]) -> None:
        """A prompt and its answer, without the answer's last token (its KV is never computed)."""
        self._known.update(self._hashes(call, tokens))

    def _ask(self, call: Call, ids: Sequence[int]) -> int:
        hashes = self._hashes(call, ids)
        most = (len(ids) - 1) // self._size
        hit = next((at for at, value in enumerate(hashes[:most]) if value not in self._known), min(most, len(hashes)))
        self._known.update(hashes)
        return hit * self._size

    def _hashes(self, call: Call, tokens: Sequence[int]) -> list[bytes]:
        return chain_hashes(chain_seed(call.model, call.salt), tokens, self._size)


class OfflineFleet:
    """`replicas` equal engines. Times given to it must not go backwards."""

    def __init__(self, policy: str, config: EngineConfig, replicas: int) -> None:
        self.router = Router(policy)
        self.tally = Tally(shares=[0] * replicas)
        self._engines = [Engine(config) for _ in range(replicas)]
        self._endless = EndlessCache(config.block_size)
        self._candidates = list(range(replicas))
        self._flights: dict[EngineSequence, Flight] = {}
        self._loras: dict[str, LoraRef] = {}
        self._count = 0
        for index in self._candidates:
            self.router.set_replica(
                index,
                key=f"http://replica-{index}:8000",
                block_size=config.block_size,
                capacity_tokens=config.capacity_blocks * config.block_size,
            )

    @property
    def in_flight(self) -> int:
        """Sequences that are not finished."""
        return len(self._flights)

    def send(self, call: Call, now: float) -> Flight:
        """Route a call and queue it. Raises ValueError when it is larger than an engine's whole cache."""
        router, tally = self.router, self.tally
        request = RouteRequest(
            model=call.model,
            salt=call.salt,
            n=call.n,
            max_tokens=call.max_tokens,
            prompts=tuple(_routed(prompt) for prompt in call.prompts),
        )
        decision = router.decide(request, call.model, self._candidates, now)
        router.start(decision, now)
        flight = Flight(call, now, decision, [], len(call.outputs))
        engine, lora = self._engines[decision.replica], self._lora(call)
        for at, output in enumerate(call.outputs):
            self._count += 1
            prompt = call.prompts[at // call.n].ids
            asked = EngineRequest(str(self._count), prompt, output, lora, call.salt or None, seed=call.seed + at)
            sequence = engine.submit(asked, now)
            flight.sequences.append(sequence)
            self._flights[sequence] = flight
        tally.requests += 1
        tally.shares[decision.replica] += 1
        tally.prompt_tokens += flight.prompt_tokens
        tally.endless += self._endless.ask(call)
        return flight

    def next_event_time(self) -> float | None:
        """When `advance` has something to do; None when nothing runs."""
        return min((at for engine in self._engines if (at := engine.next_event_time()) is not None), default=None)

    def advance(self, now: float) -> list[Flight]:
        """Let all engines work until `now`; the calls that are over."""
        over = []
        for engine in self._engines:
            due = engine.next_event_time()
            if due is None or due > now:
                continue
            for sequence in engine.advance(now):
                flight = self._flights.pop(sequence)
                flight.running -= 1
                if not flight.running:
                    self._finish(flight, now)
                    over.append(flight)
        return over

    def _finish(self, flight: Flight, now: float) -> None:
        flight.finished = now
        call, tally, sequences = flight.call, self.tally, flight.sequences
        tally.cached_tokens += flight.cached_tokens
        tally.first_token_secs += flight.first_token - flight.sent
        tally.wall_secs = max(tally.wall_secs, now)
        for sequence in sequences:
            self._endless.learn(call, [*sequence.request.prompt, *sequence.output[:-1]])
        self.router.end(
            flight.decision,
            now,
            ok=True,
            prompt_tokens=flight.prompt_tokens,
            cached_tokens=flight.cached_tokens,
            output_tokens=sum(call.outputs),
            output_ids=sequences[0].output if len(sequences) == 1 else None,
        )

    def _lora(self, call: Call) -> LoraRef | None:
        if not call.adapter:
            return None
        known = self._loras.get(call.model)
        if known is None:
            known = self._loras[call.model] = LoraRef(call.model, len(self._loras) + 1, f"/{call.model}")
        return known


@lru_cache(maxsize=1024)
def _routed(prompt: TokenIds) -> Prompt:
    raw = ",".join(map(str, prompt.ids)).encode()
    return Prompt(Kind.TOKENS, raw, xxh3_64_intdigest(raw))
