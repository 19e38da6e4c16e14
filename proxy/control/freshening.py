"""Keeps the listed versions younger, in every engine, than the unloaded ones whose slots it should give up first.

An engine pushes out whatever it used least recently, listed or not (see `slots`). Using the listed versions once makes
the ghosts the oldest. That cannot be done while the fleet is paused, and a trainer that pauses does so just before it
loads: so it is done when a version has been unloaded, and a pause waits a moment for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxy.control import slots
from proxy.control.answers import Answer, Outcome

if TYPE_CHECKING:
    from proxy.control.plane import Plane
    from proxy.fleet import Replica

WAIT_SECS = 2.0
"""How long a pause waits for it; an engine with a long queue takes longer than a trainer should wait."""


class Freshening:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._running: set[asyncio.Task[None]] = set()

    async def freshen(self, replicas: Iterable[Replica], *, loading: str = "", instead_of: str = "") -> None:
        """Use what is listed once where the next load, of the upstream name `loading`, would push some of it out.

        The binding that the load replaces (`instead_of`, a client's name) may go.
        """
        fleet, calls, secs = self._plane.fleet, self._plane.calls, self._plane.settings.admin_timeout_secs
        listed = {a.upstream for a in fleet.desired.adapters.values() if a.name != instead_of}

        async def touch(replica: Replica) -> None:
            capacity = replica.facts.max_loras if replica.facts else None
            for upstream in slots.to_touch(replica.recent or {}, listed, capacity, loading, replica.running):
                said = await calls.probe(replica.endpoint, upstream, secs)
                if not isinstance(said, Answer):
                    replica.touch(upstream)
                elif said.outcome in (Outcome.UNREACHABLE, Outcome.NO_ANSWER):
                    return  # nor would the others be answered, and a change waits

        if not fleet.paused():
            await asyncio.gather(*(touch(replica) for replica in replicas))

    def soon(self, replicas: Iterable[Replica]) -> None:
        """The same for the next load, whichever it is; nobody waits for it but `settled`."""
        task = asyncio.get_running_loop().create_task(self.freshen(replicas))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        self._plane.queue.keep(task)

    async def settled(self) -> None:
        """Return when what `soon` began is over, or WAIT_SECS have passed."""
        if self._running:
            await asyncio.wait(self._running, timeout=WAIT_SECS)
