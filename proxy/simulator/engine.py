"""A vLLM engine without a model: continuous batching over a block pool, on a clock that its owner turns.

Nothing here waits, reads a clock or does I/O (loading an adapter goes through the ``WeightSource`` it was given), so
the same engine runs behind HTTP in real time and in an offline event loop as fast as Python goes.

Time
    The engine works in steps, as vLLM does. A step holds one decode token for each running request whose prompt is
    done, and prefill chunks up to ``max_batched_tokens``. With d requests that decode it lasts

        prefill tokens / prefill_tps  +  (1 + decode_slowdown * (d - 1)) / decode_tps      (second term only if d > 0)

    divided by ``speed``. ``decode_slowdown`` 0 is a GPU far from its limits; 0.8 is a CPU where each further request
    adds 0.8 of a lone one's time to the step. What arrives during a step waits for its end. Equal decode steps are
    taken in one go: the cost of a simulation grows with requests, not with tokens.

Cache
    See ``prefix_cache``. Blocks become hittable when they are scheduled, so equal prompts that arrive together share;
    the last token of a prompt is always recomputed; generated tokens are cached too (not the last one: its KV is never
    computed). When blocks run out the youngest request is preempted and starts over, its tokens kept.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from proxy.simulator.prefix_cache import BlockPool
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef, NamedWeights, WeightSource
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
class _Step:
    """``count`` equal steps from ``start``, of which ``done`` are applied; more than one only when all decode."""

    start: float
    duration: float
    count: int
    decodes: list[Sequence]
    prefills: list[tuple[Sequence, int]]
    done: int = 0

    def end(self, number: int) -> float:
        return self.start + number * self.duration


class EngineDead(Exception):
    """A running request needed an adapter that could not be read: a real engine core dies of it."""


class Engine:
    """Owner of all state of one replica's engine. Times must not go backwards."""

    def __init__(self, config: EngineConfig, weights: WeightSource | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.pool = BlockPool(config.capacity_blocks)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.now = 0.0
        self.paused: str | None = None
        """None, ``new`` (running ones go on, new ones wait) or ``all``."""
        self._reported = (0, 0)
        self._weights = weights if weights is not None else NamedWeights()
        self._step: _Step | None = None
        self._news: dict[Sequence, None] = {}
        self._clear_when_drained = False

    # What the owner calls

    def submit(self, request: EngineRequest, now: float) -> Sequence:
        """Queue a request; it can start at ``now`` or when the current step ends.

        Raises ValueError when it asks for no token, or for more KV than the whole pool holds.
        """
        need = -(-(len(request.prompt) + request.max_tokens) // self.config.block_size)
        if not request.prompt or request.max_tokens < 1 or need > self.config.capacity_blocks:
            raise ValueError(f"a request of {need} blocks does not fit {self.config.capacity_blocks}")
        self._run(now)
        sequence = Sequence(request, now)
        self.waiting.append(sequence)
        self._cut_step()
        return sequence

    def advance(self, now: float) -> list[Sequence]:
        """Work until ``now``; the sequences that finished, and the watched ones that got tokens, since the last call.

        Raises EngineDead when an adapter in use could not be read.
        """
        self._run(now)
        news = list(self._news)
        self._news.clear()
        return news

    def next_event_time(self) -> float | None:
        """When to call ``advance`` next; None when only a new call can change anything."""
        if self._news:
            return self.now
        step = self._step
        if step is None:
            return self.now if self._has_work() else None
        watched = any(sequence.request.watch for sequence in step.decodes)
        return step.end(step.done + 1 if watched else step.count)

    def abort(self, request_ids: Iterable[str], now: float) -> int:
        """Finish these with reason ``abort``; how many there were."""
        self._run(now)
        wanted = set(request_ids)
        found = [s for s in (*self.running, *self.waiting) if s.request.id in wanted]
        self._abort(found)
        return len(found)

    def pause(self, mode: str, clear_cache: bool, now: float) -> bool:
        """``abort`` and ``wait`` let nothing new start, ``keep`` freezes all; True when the pause is complete.

        ``wait`` is complete when ``drained``. The cache is cleared then, at the price of preempting what is frozen.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        self._run(now)
        if mode == "abort":
            self._abort([*self.running, *self.waiting])
        if mode == "keep":
            self._reported = self.load
            self.paused, self._step = "all", None
        else:
            self.paused = "new"
            self._cut_step()
        if mode == "wait" and self.running:
            self._clear_when_drained = clear_cache
            return False
        if clear_cache:
            self.reset_prefix_cache(now, running_too=True)
        return True

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting, as vLLM reports them: a frozen engine takes no steps and reports nothing new."""
        return self._reported if self.paused == "all" else (len(self.running), len(self.waiting))

    @property
    def drained(self) -> bool:
        """Nothing runs (a pause with ``wait`` is complete)."""
        return not self.running

    def resume(self, now: float) -> None:
        """End any pause; what was frozen goes on from here."""
        self._run(now)
        self.paused, self._clear_when_drained = None, False
        self._cut_step()

    def reset_prefix_cache(self, now: float, running_too: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing happens, while requests hold some.

        With ``running_too`` those are preempted first: they keep their tokens and are prefilled again.
        """
        self._run(now)
        if running_too:
            self._step = None
            while self.running:
                self._preempt(self.running.pop())
        if not self.pool.reset():
            return False
        self.counters.resets += 1
        return True

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that request."""
        return next((s for s in (*self.running, *self.waiting) if s.request.id == request_id), None)

    # Steps

    def _has_work(self) -> bool:
        if self.paused == "all":
            return False
        return bool(self.running) or (self.paused is None and bool(self.waiting))

    def _run(self, now: float) -> None:
        """Apply every step that ended by ``now``."""
        while True:
            step = self._step
            if step is None:
                step = self._step = self._begin(self.now)
                if step is None:
                    break
            if step.duration:
                due = min(step.count, int((now - step.start) / step.duration) + 1)
                while due > step.done and step.end(due) > now:
                    due -= 1
            else:
                due = step.count if step.start <= now else 0
            if due > step.done:
                self._apply(step, due - step.done)
                step.done = due
                self.now = step.end(due)
            if step.done < step.count:
                break
            self._finish_step(step)
        self.now = max(self.now, now)

    def _cut_step(self) -> None:
        """End the current run of equal steps at its next boundary, because the next one may differ."""
        step = self._step
        if step is not None:
            step.count = min(step.count, step.done + 1)

    def _begin(self, at: float) -> _Step | None:
        if not self._has_work():
            if self._clear_when_drained and not self.running:
                self._clear_when_drained = False
                self.pool.reset()
                self.counters.resets += 1
            return None
        self._keep_adapters()
        decodes = [s for s in self.running if s.computed == s.length - 1 and s.produced]
        decodes = self._secure(decodes)
        budget = self.config.max_batched_tokens - len(decodes)
        prefills: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            if budget <= 0:
                break
            missing = sequence.length - sequence.computed
            if missing > 1 or not sequence.produced:
                budget -= self._prefill(sequence, min(missing, budget), prefills)
        if self.paused is None:
            self._admit(budget, prefills, at)
        if not decodes and not prefills:
            return None
        config = self.config
        duration = sum(count for _, count in prefills) / config.prefill_tps
        if decodes:
            duration += (1 + config.decode_slowdown * (len(decodes) - 1)) / config.decode_tps
        count = 1 if prefills else self._equal_steps(decodes)
        return _Step(at, duration / config.speed, count, decodes, prefills)

    def _equal_steps(self, decodes: list[Sequence]) -> int:
        """How many steps the batch stays the same: until one finishes, or the blocks run out."""
        count = min(s.remaining for s in decodes)
        size, available = self.config.block_size, self.pool.available
        while count > 1:
            need = sum(-(-(s.computed + count) // size) - len(s.blocks) - s.blanks for s in decodes)
            if need <= available:
                break
            count //= 2
        return count

    def _apply(self, step: _Step, steps: int) -> None:
        for sequence in step.decodes:
            if sequence.finish_reason is None:
                self._grow(sequence, sequence.computed + steps)
                self._produce(sequence, steps, step.end(step.done + steps))
        for sequence, count in step.prefills:
            if sequence.finish_reason is None:
                sequence.computed += count
                self.counters.prefilled += count
                if sequence.computed == sequence.length:
                    self._produce(sequence, 1, step.end(step.done + steps))

    def _produce(self, sequence: Sequence, count: int, at: float) -> None:
        sequence.produced += count
        self.counters.generated += count
        if sequence.first_token is None:
            sequence.first_token = at
        if sequence.remaining <= 0:
            self._finish(sequence, sequence.request.end_reason, at)
        elif sequence.request.watch:
            self._news[sequence] = None

    def _finish_step(self, step: _Step) -> None:
        self._step = None
        if any(s.finish_reason for s in step.decodes) or any(s.finish_reason for s, _ in step.prefills):
            self.running = [s for s in self.running if s.finish_reason is None]

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
        config, pool = self.config, self.pool
        sequence.hash_blocks(config.block_size, sequence.length)
        hit = (
            pool.longest_hit(sequence.hashes[: (sequence.length - 1) // config.block_size])
            if config.prefix_caching
            else []
        )
        need = -(-sequence.length // config.block_size) - len(hit)
        if need > pool.available - pool.free_among(hit):
            return False
        pool.hold(hit)
        pool.take(need)
        sequence.blocks, sequence.blanks = hit, need
        sequence.computed = len(hit) * config.block_size
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

    def _finish(self, sequence: Sequence, reason: str, at: float) -> None:
        sequence.finish_reason, sequence.finished = reason, at
        sequence.output  # noqa: B018  tokens are drawn while their state is known
        self._release(sequence)
        self.counters.finished[reason] = self.counters.finished.get(reason, 0) + 1
        self._news[sequence] = None

    def _abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._finish(sequence, "abort", self.now)
        self.running = [s for s in self.running if s.finish_reason is None]
        self.waiting = deque(s for s in self.waiting if s.finish_reason is None)
        self._cut_step()

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
