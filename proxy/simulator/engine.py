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

from proxy.simulator.prefix_cache import BlockPool
from proxy.simulator.scheduler import Counters, EngineConfig, EngineDead, Scheduler, Step
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import NamedWeights, WeightSource

__all__ = ["Counters", "Engine", "EngineConfig", "EngineDead"]


class Engine:
    """Owner of all state of one replica's engine. Times must not go backwards."""

    def __init__(self, config: EngineConfig, weights: WeightSource | None = None) -> None:
        self.config = config
        self.now = 0.0
        self.paused: str | None = None
        """None, ``new`` (running ones go on, new ones wait) or ``all``."""
        self._batch = Scheduler(config, weights if weights is not None else NamedWeights())
        self._step: Step | None = None
        self._clear_when_drained = False
        self._reported = (0, 0)

    @property
    def counters(self) -> Counters:
        return self._batch.counters

    @property
    def pool(self) -> BlockPool:
        return self._batch.pool

    @property
    def running(self) -> list[Sequence]:
        return self._batch.running

    @property
    def waiting(self) -> deque[Sequence]:
        return self._batch.waiting

    @property
    def load(self) -> tuple[int, int]:
        """Requests running and waiting, as vLLM reports them: a frozen engine takes no step and reports nothing new."""
        return self._reported if self.paused == "all" else (len(self.running), len(self.waiting))

    @property
    def drained(self) -> bool:
        """Nothing runs (a pause with ``wait`` is complete)."""
        return not self.running

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that request."""
        return next((s for s in (*self.running, *self.waiting) if s.request.id == request_id), None)

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
        self._run(now, begin=True)
        news = list(self._batch.news)
        self._batch.news.clear()
        return news

    def next_event_time(self) -> float | None:
        """When to call ``advance`` next; None when only a new call can change anything."""
        if self._batch.news:
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
        self._batch.abort(found, now)
        self._cut_step()
        return len(found)

    def pause(self, mode: str, clear_cache: bool, now: float) -> bool:
        """``abort`` and ``wait`` let nothing new start, ``keep`` freezes all; True when the pause is complete.

        ``wait`` is complete when ``drained``. The cache is cleared then, at the price of preempting what is frozen.
        """
        if mode not in ("abort", "wait", "keep"):
            raise ValueError(f"Invalid pause mode: {mode}")
        self._run(now)
        if mode == "abort":
            self._batch.abort([*self.running, *self.waiting], now)
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
            self._batch.preempt_all()
        if not self.pool.reset():
            return False
        self.counters.resets += 1
        return True

    def _has_work(self) -> bool:
        if self.paused == "all":
            return False
        return bool(self.running) or (self.paused is None and bool(self.waiting))

    def _run(self, now: float, begin: bool = False) -> None:
        """Apply every step that ended by ``now``; one that would start just now waits, unless ``begin``, so that calls
        made at the same time share it."""
        while True:
            step = self._step
            if step is None:
                step = self._step = self._begin() if begin or self.now < now else None
                if step is None:
                    break
            due = _steps_due(step, now)
            if due > step.done:
                self._batch.apply(step, due - step.done)
                self.now = step.end(due)
            if step.done < step.count:
                break
            self._step = None
            self._batch.retire(step)
        self.now = max(self.now, now)

    def _begin(self) -> Step | None:
        if self._has_work():
            return self._batch.plan(self.now, admit=self.paused is None)
        if self._clear_when_drained and not self.running:
            self._clear_when_drained = False
            self.pool.reset()
            self.counters.resets += 1
        return None

    def _cut_step(self) -> None:
        """End the current run of equal steps at its next boundary, because the next one may differ."""
        step = self._step
        if step is not None:
            step.count = min(step.count, step.done + 1)
            if not self.running:
                self._step = None


def _steps_due(step: Step, now: float) -> int:
    """How many of its equal steps are over; exact where ``now`` came from ``Step.end``."""
    if not step.duration:
        return step.count if step.start <= now else step.done
    due = min(step.count, int((now - step.start) / step.duration) + 1)
    while due > step.done and step.end(due) > now:
        due -= 1
    return due
