"""Loading an adapter over the fleet: what a name means from then on."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proxy.control import edits
from proxy.control.adapter_files import check_name
from proxy.control.arrival import arrived, written_before
from proxy.control.asking import broadcast, participants, take_off
from proxy.control.desired import Adapter, choose_upstream
from proxy.control.failpoints import reach
from proxy.control.loading import Loading, Verdict
from proxy.control.plan import same_path
from proxy.control.result import Result
from proxy.control.room import make_room
from proxy.control.sight import fingerprint, look
from proxy.control.transaction import Said, Seat
from proxy.control.verify import disagreement
from proxy.errors import Conflict, ReplicaAnswer, TransactionFailed

if TYPE_CHECKING:
    from proxy.control.adapter_files import Seen
    from proxy.control.plane import Plane
    from proxy.control.queue import Stopwatch, Turn
    from proxy.fleet import Replica

TRIES = 3
"""Upstream names that are tried when replicas list one after the other already."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`digest` is what the client says the weights are, None when it did not say."""

    name: str
    path: str
    digest: str | None = None


@dataclass(slots=True)
class Load:
    """One load on its way. It has its turn while replicas are asked and while it commits; not while it waits for files,
    be it that the proxy does not see them whole or that a replica does not."""

    plane: Plane
    request: LoadRequest
    turn: Turn
    watch: Stopwatch
    deadline: float = field(init=False)
    seen: Seen | None = None
    read_from: float = math.inf
    """Wall-clock seconds: no replica that has the adapter began to read it before."""

    async def run(self) -> None:
        """Raises BadRequest, Conflict (no slot), Unavailable (no replica), TransactionFailed (undone)."""
        plane, request = self.plane, self.request
        self.deadline = asyncio.get_running_loop().time() + plane.settings.load_deadline_secs
        self.watch.lap("queue")
        self.seen = await arrived(plane, request.path, request.digest, self.deadline)
        reach("after-files")
        self.watch.lap("files")
        digest = request.digest or (self.seen.digest if self.seen else None)
        async with self.turn:
            self.watch.lap("queue")
            if await self._means_that_already(digest):
                return
            self._check_provable()
            replicas = await participants(plane)
            check_name(request.name, plane.fleet.base_models())  # they may have become known only now
            await make_room(plane, request.name)
        conflict: set[str] = set()
        for _ in range(TRIES):
            adapter = await self._reserve(digest, frozenset(conflict))
            try:
                result = await self._offer(adapter, replicas)
                if result is not None:
                    done = [plane.fleet.replicas[index] for index in result.where(Seat.DONE)]
                    if digest is not None or await self._late(adapter, done):
                        digest = digest or (self.seen.digest if self.seen else None)
                        async with self.turn:
                            await self._commit(replace(adapter, digest=digest), done)
                        self.watch.lap("commit")
                        return
                    digest = self.seen.digest if self.seen else None
            finally:
                plane.pending.discard(adapter.upstream)
            conflict.add(adapter.upstream)
        raise TransactionFailed(
            f"{request.name!r} is listed on a replica under weights that nobody knows, and cannot be replaced"
        )

    async def _means_that_already(self, digest: str | None) -> bool:
        bound = self.plane.fleet.desired.adapters.get(self.request.name)
        if bound is None or digest is None or bound.digest != digest:
            return False
        if not same_path(bound.path, self.request.path):  # restarts from now on should not depend on the older files
            await self.plane.edit(edits.bind(replace(bound, path=self.request.path)))
        return True

    async def _late(self, adapter: Adapter, done: list[Replica]) -> bool:
        """The files have come into sight while replicas loaded them; then their digest must be known from now on, or a
        replica that restarts could load whatever lies there by then. False: replicas may have read other bytes than
        these, so the adapter is off them again, and is to be offered once more, with its digest."""
        self.seen = await look(self.plane, adapter.path)
        if self.seen is None or written_before(self.seen, self.read_from):
            return True
        async with self.turn:
            await self._take_back(adapter, done)
        return False

    def _check_provable(self) -> None:
        if self.plane.settings.verify_load and self.plane.fleet.paused():
            raise Conflict(
                f"loading {self.request.name!r} cannot be proven while the fleet is paused or asleep (--verify-load): "
                "resume first, or serve with --pause lazy"
            )

    # -- the name that replicas are told -------------------------------------------------------------------------------

    async def _reserve(self, digest: str | None, conflict: frozenset[str]) -> Adapter:
        """Choose it, pending from now on, and write it down before the first replica hears it."""
        plane, request = self.plane, self.request
        async with self.turn:
            upstream = self._choose(digest, conflict)
            plane.pending.add(upstream)
            try:
                used = plane.fleet.desired.used
                if upstream not in used or used[upstream] != digest:
                    await plane.edit(edits.reserve(upstream, digest))
            except BaseException:
                plane.pending.discard(upstream)
                raise
            reach("after-reserve")
        return Adapter(request.name, request.path, digest, upstream)

    def _choose(self, digest: str | None, conflict: frozenset[str]) -> str:
        fleet, name = self.plane.fleet, self.request.name
        desired, members = fleet.desired, fleet.members()
        held = {upstream for replica in members for upstream in replica.holds}
        foreign = {upstream for upstream in held if desired.by_upstream(upstream) is None}
        unsure = {upstream for replica in members for upstream in replica.tainted}
        if any(replica.stale_cache and replica.facts is not None for replica in members):
            foreign.add(name)
        seen = frozenset(foreign | unsure | conflict | self.plane.leaving.keys())
        return choose_upstream(desired, name, digest, seen=seen, nonce=secrets.token_hex(6))

    # -- the replicas --------------------------------------------------------------------------------------------------

    async def _offer(self, adapter: Adapter, replicas: list[Replica]) -> Result | None:
        """Load it on all of them. None when one listed the upstream name already: another must be chosen.

        Raises TransactionFailed; Conflict when other loads have taken the room meanwhile.
        """
        plane, fleet = self.plane, self.plane.fleet
        abandoned = placed = False
        full: list[Conflict] = []
        loadings: dict[int, Loading] = {}
        started: dict[int, float] = {}
        self.read_from = math.inf

        @asynccontextmanager
        async def attempt(replica: Replica) -> AsyncIterator[None]:
            async with self.turn:
                if not placed:
                    try:
                        await make_room(plane, adapter.name)
                    except Conflict as error:
                        full.append(error)
                        raise
                await plane.freshening.freshen([replica], loading=adapter.upstream, instead_of=adapter.name)
                reach("before-load")
                started[replica.index] = plane.wall()
                yield
                reach("after-load")

        def listed(replica: Replica) -> frozenset[str]:
            return frozenset(a.upstream for a in fleet.desired.adapters.values() if a.upstream in replica.holds)

        async def ask(index: int) -> Verdict:
            nonlocal abandoned, placed
            replica = fleet.replicas[index]
            loading = loadings[index] = Loading(
                plane.calls,
                index,
                replica.endpoint,
                adapter.upstream,
                adapter.path,
                lambda: listed(replica),
                lambda: attempt(replica),
                self.deadline,
                plane.settings.load_deadline_secs,
                lambda: abandoned,
                ours=adapter.upstream in replica.holds,  # only one that retires is (see _choose)
            )
            verdict = await loading.run()
            if verdict.said is Said.OK:
                placed = True
                self.read_from = min(self.read_from, started[index])
                fleet.held(index, adapter.upstream, adapter.path)
                return verdict
            if verdict.unsure:
                fleet.taint(index, adapter.upstream, "the answer to a load was lost")
            abandoned = abandoned or verdict.said is Said.REFUSED
            return verdict

        async def undo(index: int) -> Verdict:
            async with self.turn:
                return await self._undo_on(index, adapter)

        def died(index: int) -> Said:
            """A replica that dies while it is not being asked does not die of the load."""
            return Said.DIED if index not in loadings or loadings[index].asking else Said.GONE

        result = await broadcast(plane, replicas, ask=ask, undo=undo, canary=True, died=died)
        self.watch.lap("load")
        if result.committed:
            return result
        if any(verdict.conflict for verdict in result.verdicts.values()):
            return None
        if full:
            raise full[0]
        raise load_failure(adapter, result) or result.failure(f"loading {adapter.name!r}")

    async def _undo_on(self, index: int, adapter: Adapter) -> Verdict:
        """Take a name that was not committed off one replica; one that was there before, retiring, stays."""
        fleet = self.plane.fleet
        if fleet.desired.by_upstream(adapter.upstream) is not None:
            return Verdict(Said.OK, ReplicaAnswer(index, None, "held it before"))
        verdict = await take_off(self.plane, index, adapter.upstream)
        if verdict.said is not Said.OK:
            fleet.taint(index, adapter.upstream, "a load could not be undone")
        return verdict

    async def _take_back(self, adapter: Adapter, replicas: list[Replica]) -> None:
        await asyncio.gather(*(self._undo_on(replica.index, adapter) for replica in replicas))

    # -- the commit ----------------------------------------------------------------------------------------------------

    async def _commit(self, adapter: Adapter, replicas: list[Replica]) -> None:
        """Every replica has it: make it what the name means. Raises TransactionFailed, undone, when the replicas do not
        prove it (--verify-load), when the files have changed since they were looked at, or when the journal cannot be
        written."""
        plane = self.plane
        if plane.settings.verify_load:
            await self._verify(adapter, replicas)
        if not await self._unchanged(adapter):
            await self._take_back(adapter, replicas)
            await plane.edit(edits.reserve(adapter.upstream, None))  # nobody knows what this name stood for
            raise TransactionFailed(f"the files at {adapter.path} changed while they were loaded; undone, try again")
        reach("before-commit")
        try:
            await plane.edit(edits.bind(adapter))
        except TransactionFailed:
            await self._take_back(adapter, replicas)
            raise
        reach("after-commit")

    async def _unchanged(self, adapter: Adapter) -> bool:
        """Whether the files are still those that the digest was taken of, or promised for, as far as can be seen."""
        plane, seen = self.plane, self.seen
        if seen is not None:
            return await fingerprint(plane, adapter.path) == seen.fingerprint
        now = await look(plane, adapter.path) if adapter.digest else None
        return now is None or now.digest == adapter.digest

    async def _verify(self, adapter: Adapter, replicas: list[Replica]) -> None:
        """Every replica's log-probabilities under the name agree, and are not the base model's."""
        plane = self.plane
        base = plane.fleet.base_models()[0]
        try:
            self._check_provable()  # somebody may have paused the fleet while files were waited for
            why = await disagreement(plane.calls, replicas, adapter, base, plane.settings.admin_timeout_secs)
        except Conflict:
            await self._take_back(adapter, replicas)
            raise
        self.watch.lap("verify")
        if why is not None:
            await self._take_back(adapter, replicas)
            raise TransactionFailed(f"loading {adapter.name!r} was undone: {why[0]}", why[1])


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
