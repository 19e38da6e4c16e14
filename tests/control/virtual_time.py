"""An event loop without a clock: when nothing is ready, its time jumps to the next thing that is due.

Hours pass in milliseconds and the same program runs the same way every time. There is no input or output: whoever
awaits something that nobody will ever do gets an error instead of a hang.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

SPINS = 200_000
"""Rounds without any time passing after which the program is taken for one that spins."""


class Stuck(RuntimeError):
    """Nothing is ready and nothing is due, or time has stopped although things are ready."""


class _Jump:
    """Stands where the selector would be: waiting for a socket means that time passes."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is ready and nothing is due: what is awaited will never happen")
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        pass


class NumberedTask(asyncio.Task[T]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], **options: Any) -> None:
        self._number = loop.next_number() if isinstance(loop, VirtualLoop) else 0
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` starts at 1000 s. `errors` collects what the loop's exception handler was told."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self._spins = 0
        self._selector = _Jump(self)
        self._clock_resolution = 1e-6
        self.errors: list[dict[str, Any]] = []
        self.set_exception_handler(lambda loop, context: self.errors.append(context))

        self._numbers = itertools.count(1)
        self.set_task_factory(NumberedTask)

    def next_number(self) -> int:
        return next(self._numbers)

    def time(self) -> float:
        return self._now

    def jump(self, secs: float) -> None:
        self._now += secs
        self._spins = self._spins + 1 if secs == 0 else 0
        if self._spins > SPINS:
            raise Stuck(f"{SPINS} rounds and no time has passed: something spins")

    def step(self) -> None:
        """One round: everything that is ready now."""
        self.call_soon(self.stop)
        self.run_forever()

    def pass_time(self, secs: float) -> None:
        self.run_until_complete(asyncio.sleep(secs))

    def idle(self) -> bool:
        """Whether nothing is ready at this moment."""
        return not self._ready  # type: ignore[attr-defined]

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextmanager
def virtual_loop() -> Generator[VirtualLoop, None, None]:
    """A loop that is closed, with whatever still runs on it cancelled."""
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        end(loop)


def end(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


def run(main: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
    """Run one coroutine in a virtual loop of its own."""
    with virtual_loop() as loop:
        result = loop.run_until_complete(main)
        assert not loop.errors, loop.errors
        return result
