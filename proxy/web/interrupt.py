"""Ending what a task awaits, from outside, without ending the task."""

from __future__ import annotations

import asyncio


class Interrupt:
    """Cancels the current task as `asyncio.timeout` does: whoever catches the cancellation asks whose it was.

    `left` says that the client went away, and that the task has nothing more to do.
    """

    __slots__ = ("_count", "_task", "left")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._count = 0
        self.left = False

    def fire(self) -> None:
        """End what the task awaits now. Not to be called by the task itself."""
        self._count += 1
        self._task.cancel()

    def caught(self) -> bool:
        """Whether the CancelledError that was just caught came from `fire` alone; else it has to go on its way."""
        while self._count:
            self._count -= 1
            self._task.uncancel()
        return not self._task.cancelling()
