"""Who may change the fleet now: one change at a time, in the order in which they were asked for.

A change that waits for something that no other change can disturb (files that are still being copied) gives its turn
away meanwhile and takes another one when it goes on; what is asked for the same name waits until it is over all the
same.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from types import TracebackType
from typing import Any, Literal, TypeVar

from proxy.control.records import TransactionRecord
from proxy.errors import LorafleetError, TransactionFailed

logger = logging.getLogger("lorafleet.control")

T = TypeVar("T")


class Stopwatch:
    """Names the phases of a change as they go by, for its record; a phase that comes again adds to its time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.began = self._mark = now()
        self._phases: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = self._now()
        self._phases[name] = self._phases.get(name, 0.0) + now - self._mark
        self._mark = now

    @property
    def phases(self) -> tuple[tuple[str, float], ...]:
        return tuple(self._phases.items())


class TurnLock(asyncio.Lock):
    """Handed on in the order of asking; `waiting` are those who asked and do not have it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = 0

    async def acquire(self) -> Literal[True]:
        self.waiting += 1
        try:
            return await super().acquire()
        finally:
            self.waiting -= 1


class Turn:
    """One change's turn: `async with` it to have it. Parts of the change that run side by side may all be inside; the
    turn is given away when the last of them has left. Not for a part that is inside already."""

    def __init__(self, lock: TurnLock, taken: Callable[[], None]) -> None:
        self._lock = lock
        self._taken = taken
        self._door = asyncio.Lock()
        self._inside = 0
        self._empty: asyncio.Future[None] | None = None

    async def __aenter__(self) -> None:
        async with self._door:
            if self._inside and self._lock.waiting:
                # Parts that overlap without end must not keep the others from their turn.
                self._empty = asyncio.get_running_loop().create_future()
                await self._empty
            if not self._inside:
                await self._lock.acquire()
                self._taken()
            self._inside += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if not self._inside:
            self._lock.release()
            if self._empty is not None and not self._empty.done():
                self._empty.set_result(None)


Change = Callable[[Turn, Stopwatch], Awaitable[T]]


class Queue:
    """`clock` is for durations, `wall` for the moment that a record shows. `on_record` gets each finished one."""

    def __init__(
        self,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_record: Callable[[TransactionRecord], None] = lambda record: None,
    ) -> None:
        self.changes = 0
        self.records: deque[TransactionRecord] = deque(maxlen=50)
        self._clock = clock
        self._wall = wall
        self._on_record = on_record
        self._ids = itertools.count(1)
        self._lock = TurnLock()
        self._last: dict[str, tuple[Hashable, asyncio.Task[Any]]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a change has its turn; one that waits for files has not."""
        return self._lock.locked()

    async def one_at_a_time(
        self, kind: str, name: str | None, key: Hashable, change: Callable[[Stopwatch], Awaitable[T]]
    ) -> T:
        """`by_turns` for a change that is one turn from beginning to end."""

        async def whole(turn: Turn, watch: Stopwatch) -> T:
            async with turn:
                watch.lap("queue")
                return await change(watch)

        return await self.by_turns(kind, name, key, whole, shown=False)

    async def by_turns(self, kind: str, name: str | None, key: Hashable, change: Change[T], *, shown: bool = True) -> T:
        """Run `change`, which takes its turns itself; after the one before it on the same name, if there is a name.

        `shown`: it counts as running before it has its first turn.

        It runs in a task of its own: a client that leaves does not break it in two. A request that equals the last one
        in the queue for the same subject (`name`, or the fleet) attaches to it and gets its result.
        """
        subject = name or ""
        last = self._last.get(subject)
        before = last[1] if last is not None and not last[1].done() else None
        if before is not None and last is not None and last[0] == key:
            task: asyncio.Task[T] = before
        else:
            run = self._run(kind, name, change, before if name is not None else None, shown)
            task = asyncio.get_running_loop().create_task(run)
            self._last[subject] = (key, task)
            self.keep(task)
            task.add_done_callback(lambda done: self._forget(subject, done))
        return await asyncio.shield(task)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that nobody waits for, and see its exception."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def cancel(self) -> None:
        """Cancel what is under way; the journal says how to go on."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _forget(self, subject: str, done: asyncio.Task[Any]) -> None:
        last = self._last.get(subject)
        if last is not None and last[1] is done:
            del self._last[subject]

    async def _run(
        self, kind: str, name: str | None, change: Change[T], before: asyncio.Task[Any] | None, shown: bool
    ) -> T:
        watch = Stopwatch(self._clock)
        number, started = next(self._ids), self._wall()

        def record(outcome: str, error: str | None = None) -> None:
            secs = self._clock() - watch.began
            self._record(TransactionRecord(number, kind, name, outcome, started, secs, watch.phases, error))

        def taken() -> None:
            self.changes += 1
            record("running")

        try:
            if before is not None:
                await asyncio.wait({before})
            if shown:
                record("running")
            result = await change(Turn(self._lock, taken), watch)
        except TransactionFailed as error:
            record("undone" if error.undone else "failed", error.message)
            logger.warning("%s: %s", f"{kind} {name}" if name else kind, error.message)
            raise
        except LorafleetError as error:
            record("failed", error.message)
            raise
        except BaseException as error:
            record("failed", f"{type(error).__name__}")
            raise
        record("committed")
        logger.info("%s: done in %.3f s", f"{kind} {name}" if name else kind, self._clock() - watch.began)
        return result

    def _record(self, entry: TransactionRecord) -> None:
        for place, known in enumerate(self.records):
            if known.id == entry.id:
                self.records[place] = entry
                break
        else:
            self.records.appendleft(entry)
        if entry.outcome != "running":
            self._on_record(entry)
