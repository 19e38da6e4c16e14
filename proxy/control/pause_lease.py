"""The lease of a pause: one that nobody ends is ended, so that a trainer that died does not freeze the fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.control.plane import Plane
from proxy.control.queue import Stopwatch

logger = logging.getLogger("lorafleet.control")

GRACE_SECS = 0.5
"""A timer may ring a little early, and the wall clock is another clock."""


class PauseLease:
    """`resume` ends a pause, inside the queue. `on_expired` is told once for each pause that was not ended in time."""

    def __init__(
        self, plane: Plane, resume: Callable[[Stopwatch], Awaitable[Any]], on_expired: Callable[[], None]
    ) -> None:
        self._plane = plane
        self._resume = resume
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """(Re)start the clock for the pause in force now, if any. Also called once at the start."""
        self.stop()
        pause, secs = self._plane.fleet.desired.pause, self._plane.settings.pause_lease_secs
        if pause is not None and secs > 0:
            left = min(max(0.0, pause.since + secs - self._plane.wall()), secs)
            self._timer = asyncio.get_running_loop().call_later(left, self._over)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _over(self) -> None:
        if not self._overdue():  # the wall clock was set back meanwhile
            self.arm()
            return
        secs = self._plane.settings.pause_lease_secs
        logger.warning("a pause was not ended within %g s (--pause-lease-secs); resuming", secs)
        self._on_expired()
        self._plane.queue.keep(asyncio.get_running_loop().create_task(self._end()))

    def _overdue(self) -> bool:
        """Whether the pause in force now has outlived its lease: not one that began since the timer rang."""
        pause, secs = self._plane.fleet.desired.pause, self._plane.settings.pause_lease_secs
        return pause is not None and secs > 0 and self._plane.wall() >= pause.since + secs - GRACE_SECS

    async def _end(self) -> None:
        """Keeps trying: a pause that the lease cannot end would be frozen for good."""

        async def change(watch: Stopwatch) -> None:
            if self._overdue():
                await self._resume(watch)

        while self._overdue():
            try:
                await self._plane.queue.one_at_a_time("resume", None, ("lease over",), change)
            except Exception as error:
                logger.warning("the pause could not be ended yet: %s", error)
                await asyncio.sleep(1.0)
