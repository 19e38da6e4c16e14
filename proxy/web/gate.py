"""Where requests wait while the fleet is paused or nobody can serve them. In order of arrival, bounded, no polling."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.errors import Unavailable
from proxy.fleet import Fleet


class Gate:
    """The queue of waiting requests. A request that stops waiting, for whatever reason, leaves nothing behind."""

    def __init__(self, fleet: Fleet, limit: int, gauge: Callable[[int], None]) -> None:
        self._fleet = fleet
        self._limit = limit
        self._gauge = gauge
        self._queue: dict[asyncio.Future[None], None] = {}  # used as a set that remembers the order
        fleet.watch(self._changed)

    def __len__(self) -> int:
        return len(self._queue)

    async def wait(self, secs: float | None, *, waited: bool = False) -> None:
        """Return after the fleet changed so that somebody may serve, or when `secs` are over: look again then.

        Raises Unavailable when the queue is full; not for a request that `waited` already and lost its turn.
        """
        if len(self._queue) >= self._limit and not waited:
            raise Unavailable(f"{self._limit} requests are waiting already", retry_after_secs=5)
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(secs, _settle, turn) if secs is not None else None
        self._queue[turn] = None
        self._gauge(len(self._queue))
        try:
            await turn
        finally:
            if timer is not None:
                timer.cancel()
            self._queue.pop(turn, None)
            self._gauge(len(self._queue))

    def _changed(self) -> None:
        if self._queue and not self._fleet.paused() and self._fleet.routable():
            queue, self._queue = self._queue, {}
            for turn in queue:
                _settle(turn)


def _settle(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
