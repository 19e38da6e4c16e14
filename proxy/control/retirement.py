"""Bindings on their way out: those that drain, and those whose files are lost."""

from __future__ import annotations

import logging

from proxy.control import edits
from proxy.control.desired import Adapter
from proxy.control.plane import Plane
from proxy.control.sight import see
from proxy.replica_state import State

logger = logging.getLogger("lorafleet.reconcile")


class Retirement:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._drain_until: dict[str, float] = {}
        self._lost_since: dict[str, float] = {}
        self._ending: set[str] = set()

    def draining(self) -> set[str]:
        """Retiring names under which completions still run, until the drain deadline: the replicas keep them."""
        fleet, now = self._plane.fleet, self._plane.fleet.clock()
        retiring = {adapter.upstream for adapter in fleet.desired.retiring}
        until = now + self._plane.settings.unload_drain_secs
        self._drain_until = {upstream: self._drain_until.get(upstream, until) for upstream in retiring}
        return {name for name, end in self._drain_until.items() if fleet.running.get(name) and now < end}

    async def finish(self) -> None:
        """Forget retiring names that no living replica holds any more. Raises TransactionFailed."""
        plane, fleet = self._plane, self._plane.fleet
        for adapter in fleet.desired.retiring:
            upstream = adapter.upstream
            held = any(upstream in r.holds for r in fleet.members() if r.state not in (State.DOWN, State.DRAINING))
            if held or upstream in plane.pending or upstream in self._ending:
                continue
            self._ending.add(upstream)
            try:
                await plane.edit(edits.retired(upstream))
            finally:
                self._ending.discard(upstream)

    def found(self, adapter: Adapter) -> None:
        """It can be loaded after all."""
        self._lost_since.pop(adapter.upstream, None)

    async def could_not_load(self, adapter: Adapter) -> None:
        """An adapter that no living replica holds and whose committed files the proxy does not see either keeps every
        replica from serving: after a while it is given up, so that yesterday's deleted run does not block today's."""
        plane, fleet = self._plane, self._plane.fleet
        try:
            seen = await see(plane, adapter.path)
            there = seen is not None and adapter.digest in (None, seen.digest)
        except TimeoutError:  # whether they are there will be known when the mount answers again
            there = True
        if there or any(adapter.upstream in r.holds for r in fleet.members() if r.state is not State.DOWN):
            self.found(adapter)
            return
        since = self._lost_since.setdefault(adapter.upstream, fleet.clock())
        if fleet.clock() - since < plane.settings.lost_files_secs or plane.busy or adapter.upstream in self._ending:
            return
        logger.error("%s is given up: no replica holds it and its files cannot be loaded any more", adapter.name)
        self._ending.add(adapter.upstream)
        try:
            await plane.edit(edits.unbind(adapter))
        finally:
            self._ending.discard(adapter.upstream)
