"""Which requests a step serves and which blocks they get: the waiting line, the batch, and the rules between them.

Follows ``vllm/v1/core/sched/scheduler.py``: running requests first, one token each; then prefill chunks while the token
budget lasts; then the waiting ones in order, past those whose adapter would be one too many. See ``engine`` for time.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

from proxy.simulator.prefix_cache import BlockPool
from proxy.simulator.sequence import Sequence
from proxy.simulator.slots import LoraRef, WeightSource
from proxy.simulator.weights import BASE


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes in tokens and blocks, speeds in tokens per second (``inf``: at once)."""

    block_size: int = 16
    capacity_blocks: int = 4096
    max_num_seqs: int = 256
    max_batched_tokens: int = 8192
    prefill_tps: float = inf
    decode_tps: float = inf
    decode_slowdown: float = 0.0
    speed: float = 1.0
    max_loras: int = 8
    prefix_caching: bool = True
    base_weights: str = BASE


@dataclass(slots=True)
class Counters:
    """Totals since the engine started."""

    queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hits: int = 0
    prompt_tokens: int = 0
    prefilled: int = 0
    """Tokens computed by prefill, those of preempted and re-started requests included."""
    generated: int = 0
    preemptions: int = 0
    resets: int = 0
    finished: dict[str, int] = field(default_factory=dict)

    @property
    def misses(self) -> int:
        """Looked up and not found."""
        return self.queries - self.hits


@dataclass(slots=True)
class Step:
    """``count`` equal steps from ``start``, of which ``done`` are applied; more than one only when all decode."""

    start: float
    duration: float
    count: int
    decodes: list[Sequence]
    prefills: list[tuple[Sequence, int]]
    done: int = 0

    def end(self, number: int) -> float:
        """When the first ``number`` of them are over."""
        return self.start + number * self.duration


class EngineDead(Exception):
    """A running request needed an adapter that could not be read: a real engine core dies of it."""


class Scheduler:
    """Owner of the requests and blocks of one engine; told what time it is, never looking."""

    def __init__(self, config: EngineConfig, weights: WeightSource) -> None:
        self.config = config
        self.counters = Counters()
        self.pool = BlockPool(config.capacity_blocks)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.news: dict[Sequence, None] = {}
        """Finished sequences, and watched ones with new tokens, in order."""
        self._weights = weights

    # A step

    def plan(self, at: float, admit: bool) -> Step | None:
        """The next step, its blocks taken; None when there is nothing to do. Raises EngineDead."""
        self._keep_adapters()
        decodes = self._secure([s for s in self.running if s.produced and s.computed == s.length - 1])
        budget = self.config.max_batched_tokens - len(decodes)
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            missing = sequence.length - sequence.computed
            if budget > 0 and (missing > 1 or not sequence.produced):
                budget -= self._prefill(sequence, min(missing, budget), prefills)
        if admit:
            self._admit(budget, prefills, at)
        if not decodes and not prefills:
            return None
        config = self.config
        duration = sum(count for _, count in prefills) / config.prefill_tps
        if decodes:
            duration += (1 + config.decode_slowdown * (len(decodes) - 1)) / config.decode_tps
        count = 1 if prefills else self._equal_steps(decodes)
        return Step(at, duration / config.speed, count, decodes, prefills)

    def apply(self, step: Step, steps: int) -> None:
        """Let ``steps`` more of the step happen."""
        at = step.end(step.done + steps)
        for sequence in step.decodes:
            if sequence.finish_reason is None:
                self._grow(sequence, sequence.computed + steps)
                self._produce(sequence, steps, at)
        for sequence, count in step.prefills:
            if sequence.finish_reason is None:
                sequence.computed += count
                self.counters.prefilled += count
                if sequence.computed == sequence.length:
                    self._produce(sequence, 1, at)
        step.done += steps

    def retire(self, step: Step) -> None:
        """Drop from the batch what the step finished."""
        if any(s.finish_reason for s in step.decodes) or any(s.finish_reason for s, _ in step.prefills):
            self.running = [s for s in self.running if s.finish_reason is None]

    def abort(self, sequences: list[Sequence], at: float) -> None:
        """Finish these now."""
        for sequence in sequences:
            self._finish(sequence, "abort", at)
        self.running = [s for s in self.running if s.finish_reason is None]
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)

    def preempt_all(self) -> None:
        """Back to the head of the line with the whole batch, in order, tokens kept and KV given up."""
        while self.running:
            self._preempt(self.running.pop())

    def _equal_steps(self, decodes: list[Sequence]) -> int:
        """How many steps the batch stays the same: until one finishes, or the blocks run out."""
        count = min(s.remaining for s in decodes)
        size, available = self.config.block_size, self.pool.available
        while count > 1:
            need = sum(max(0, -(-(s.computed + count) // size) - len(s.blocks) - s.blanks) for s in decodes)
            if need <= available:
                break
            count //= 2
        return count

    def _produce(self, sequence: Sequence, count: int, at: float) -> None:
        sequence.produced += count
        self.counters.generated += count
        if sequence.first_token is None:
            sequence.first_token = at
        if sequence.remaining <= 0:
            self._finish(sequence, sequence.request.end_reason, at)
        elif sequence.request.watch:
            self.news[sequence] = None

    def _finish(self, sequence: Sequence, reason: str, at: float) -> None:
        sequence.finish_reason, sequence.finished = reason, at
        self._release(sequence)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self.news[sequence] = None

    # Admission and blocks

    def _admit(self, budget: int, prefills: list[tuple[Sequence, int]], at: float) -> None:
        """Start waiting requests in order while budget, seats, adapter slots and blocks last."""
        config = self.config
        loras = {s.request.lora.int_id for s in self.running if s.request.lora}
        skipped: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < config.max_num_seqs:
            sequence = self.waiting.popleft()
            lora = sequence.request.lora
            if lora and lora.int_id not in loras and len(loras) >= config.max_loras:
                skipped.append(sequence)
                continue
            sequence.weights = self._activate(lora, fresh=True)
            if not self._seat(sequence):
                skipped.append(sequence)
                break
            if lora:
                loras.add(lora.int_id)
            if sequence.started is None:
                sequence.started = at
            self.running.append(sequence)
            budget -= self._prefill(sequence, min(sequence.length - sequence.computed, budget), prefills)
        self.waiting.extendleft(reversed(skipped))

    def _seat(self, sequence: Sequence) -> bool:
        """Give a request its cached prefix and blanks for the rest of what it has; False when blocks are short."""
        size, pool = self.config.block_size, self.pool
        hit = []
        if self.config.prefix_caching:
            sequence.hash_blocks(size, sequence.length)
            hit = pool.longest_hit(sequence.hashes[: (sequence.length - 1) // size])
        need = -(-sequence.length // size) - len(hit)
        if need > pool.available - pool.free_among(hit):
            return False
        pool.hold(hit)
        pool.take(need)
        sequence.blocks, sequence.blanks = hit, need
        sequence.computed = len(hit) * size
        sequence.settle()
        if not sequence.preemptions:
            prompt = len(sequence.request.prompt)
            sequence.cached_tokens = sequence.computed
            self.counters.queries += prompt
            self.counters.hits += sequence.computed
            self.counters.prompt_tokens += prompt
        return True

    def _prefill(self, sequence: Sequence, count: int, prefills: list[tuple[Sequence, int]]) -> int:
        """Schedule ``count`` tokens of a seated request; its blocks are hittable from now."""
        prefills.append((sequence, count))
        self._store(sequence, sequence.computed + count)
        return count

    def _grow(self, sequence: Sequence, computed: int) -> None:
        """Make room for, and cache, the KV of the first ``computed`` tokens."""
        need = -(-computed // self.config.block_size) - len(sequence.blocks) - sequence.blanks
        if need > 0:
            self.pool.take(need)
            sequence.blanks += need
        sequence.computed = computed
        self._store(sequence, computed)

    def _store(self, sequence: Sequence, upto: int) -> None:
        size = self.config.block_size
        if not self.config.prefix_caching or upto // size <= len(sequence.blocks):
            return
        sequence.hash_blocks(size, upto)
        blocks = sequence.blocks
        for block_hash in sequence.hashes[len(blocks) : upto // size]:
            blocks.append(self.pool.store(block_hash, sequence.weights, blocks[-1] if blocks else None))
            sequence.blanks -= 1

    def _secure(self, decodes: list[Sequence]) -> list[Sequence]:
        """Give every decode the block for its next token, preempting from the youngest when they run short."""
        size = self.config.block_size
        while True:
            short = [s for s in decodes if s.computed + 1 > (len(s.blocks) + s.blanks) * size]
            if len(short) <= self.pool.available:
                break
            victim = self.running.pop()
            self._preempt(victim)
            decodes = [s for s in decodes if s is not victim]
        self.pool.take(len(short))
        for sequence in short:
            sequence.blanks += 1
        return decodes

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks, sequence.blanks)
        sequence.blocks, sequence.blanks = [], 0

    # Adapters

    def _activate(self, lora: LoraRef | None, fresh: bool) -> str:
        if lora is None:
            return self.config.base_weights
        try:
            return self._weights.activate(lora, fresh)
        except Exception as error:
            raise EngineDead(str(error)) from error

    def _keep_adapters(self) -> None:
        """Touch the adapters of all running requests: one that lost its slot meanwhile is read again."""
        seen: dict[int, str] = {}
        for sequence in self.running:
            lora = sequence.request.lora
            if lora is None:
                continue
            weights = seen.get(lora.int_id)
            if weights is None:
                weights = seen[lora.int_id] = self._activate(lora, fresh=False)
            if weights != sequence.weights:
                sequence.weights = weights
                sequence.settle()
