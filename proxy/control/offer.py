"""An adapter is offered to replicas under one upstream name: all of them load it, or none keeps it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.control.asking import broadcast, take_off
from proxy.control.failpoints import reach
from proxy.control.loading import Loading, Verdict
from proxy.control.result import Result
from proxy.control.room import check_pushed_out, make_room
from proxy.control.transaction import Said
from proxy.errors import Conflict, ReplicaAnswer, TransactionFailed

if TYPE_CHECKING:
    from proxy.control.desired import Adapter
    from proxy.control.plane import Plane
    from proxy.control.queue import Turn
    from proxy.fleet import Replica


@dataclass(slots=True)
class Offer:
    """`read_from` (wall-clock seconds): no replica that has the adapter began to read it before. `deadline` is loop
    time."""

    plane: Plane
    adapter: Adapter
    turn: Turn
    deadline: float
    read_from: float = math.inf
    _full: Conflict | None = None
    _abandoned: bool = False
    _placed: bool = False
    _loadings: dict[int, Loading] = field(default_factory=dict)
    _started: dict[int, float] = field(default_factory=dict)

    async def make(self, replicas: list[Replica]) -> Result:
        """The result of a load that happened, or of one that another upstream name may bring about (`in_the_way`).

        Raises TransactionFailed; Conflict when other loads have taken the room meanwhile.
        """
        result = await broadcast(self.plane, replicas, ask=self._ask, undo=self._undo, canary=True, died=self._died)
        if result.committed or in_the_way(result):
            return result
        if self._full is not None:
            raise self._full
        raise load_failure(self.adapter, result) or result.failure(f"loading {self.adapter.name!r}")

    async def take_back(self, indices: Iterable[int]) -> None:
        """It was loaded and is not to stay. Inside the turn."""
        await asyncio.gather(*map(self._undo_on, indices))

    async def _ask(self, index: int) -> Verdict:
        plane, fleet, adapter = self.plane, self.plane.fleet, self.adapter
        replica = fleet.replicas[index]
        loading = self._loadings[index] = Loading(
            plane.calls,
            index,
            replica.endpoint,
            adapter.upstream,
            adapter.path,
            lambda: {a.upstream for a in fleet.desired.adapters.values()} & replica.holds.keys(),
            lambda: self._attempt(replica),
            self.deadline,
            plane.settings.load_deadline_secs,
            lambda: self._abandoned,
            ours=adapter.upstream in replica.holds,  # only one that retires is: names of others are not chosen
        )
        verdict = await loading.run()
        if verdict.said is Said.OK:
            self._placed = True
            self.read_from = min(self.read_from, self._started[index])
            fleet.held(index, adapter.upstream, adapter.path)
            return verdict
        if verdict.unsure:
            fleet.taint(index, adapter.upstream, "the answer to a load was lost")
        self._abandoned = self._abandoned or verdict.said is Said.REFUSED
        return verdict

    @asynccontextmanager
    async def _attempt(self, replica: Replica) -> AsyncIterator[None]:
        """The turn, with room for the adapter. Raises Conflict."""
        plane, adapter = self.plane, self.adapter
        async with self.turn:
            try:
                if not self._placed:
                    await make_room(plane, adapter.name)
                await plane.freshening.freshen([replica], loading=adapter.upstream, instead_of=adapter.name)
                await check_pushed_out(plane, replica, adapter)
            except Conflict as error:
                self._full = error
                raise
            reach("before-load")
            self._started[replica.index] = plane.wall()
            yield
            reach("after-load")

    def _died(self, index: int) -> Said:
        """A replica that dies while it is not being asked does not die of the load."""
        loading = self._loadings.get(index)
        if loading is not None and not loading.asking:
            return Said.GONE
        self.plane.fleet.taint(index, self.adapter.upstream, "it stopped answering during a load")
        return Said.DIED

    async def _undo(self, index: int) -> Verdict:
        async with self.turn:
            return await self._undo_on(index)

    async def _undo_on(self, index: int) -> Verdict:
        """Take a name that was not committed off one replica; one that was there before, retiring, stays."""
        fleet, upstream = self.plane.fleet, self.adapter.upstream
        if fleet.desired.by_upstream(upstream) is not None:
            return Verdict(Said.OK, ReplicaAnswer(index, None, "held it before"))
        verdict = await take_off(self.plane, index, upstream)
        if verdict.said is not Said.OK:
            fleet.taint(index, upstream, "a load could not be undone")
        return verdict


def in_the_way(result: Result) -> bool:
    """Whether a replica listed the upstream name already, with weights that nobody knows."""
    return any(verdict.conflict for verdict in result.verdicts.values())


def load_failure(adapter: Adapter, result: Result) -> TransactionFailed | None:
    """Two failures that deserve their own words: an adapter that killed an engine, and files that never showed."""
    if result.said(Said.DIED) and not result.said(Said.OK, Said.REFUSED):
        return TransactionFailed(
            f"loading {adapter.name!r} was stopped: a replica died on it, so it was not offered to the others",
            result.of_each(),
        )
    if any("not loadable within" in answer.message for answer in result.said(Said.REFUSED)):
        return TransactionFailed(
            f"loading {adapter.name!r} failed and was undone on every replica", result.of_each(), status=504
        )
    return None
