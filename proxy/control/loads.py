"""Loading an adapter over the fleet: what a name means from then on."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proxy.control import edits
from proxy.control.adapter_files import check_name
from proxy.control.arrival import arrived, written_before
from proxy.control.asking import participants
from proxy.control.desired import Adapter, choose_upstream
from proxy.control.failpoints import reach
from proxy.control.offer import Offer
from proxy.control.plan import same_path
from proxy.control.room import make_room
from proxy.control.sight import fingerprint, look
from proxy.control.transaction import Seat
from proxy.control.verify import disagreement
from proxy.errors import Conflict, TransactionFailed

if TYPE_CHECKING:
    from proxy.control.adapter_files import Seen
    from proxy.control.plane import Plane
    from proxy.control.queue import Stopwatch, Turn

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
                offer = Offer(plane, adapter, self.turn, self.deadline)
                result = await offer.make(replicas)
                self.watch.lap("load")
                if result.committed:
                    done = result.where(Seat.DONE)
                    known = digest is not None or await self._late(offer, done)
                    digest = digest or (self.seen.digest if self.seen else None)
                    if known:
                        async with self.turn:
                            await self._commit(offer, replace(adapter, digest=digest), done)
                        self.watch.lap("commit")
                        return
            finally:
                plane.pending.discard(adapter.upstream)
            conflict.add(adapter.upstream)
        raise TransactionFailed(
            f"{request.name!r} is listed on a replica under weights that nobody knows, and cannot be replaced",
            result.of_each(),
        )

    async def _means_that_already(self, digest: str | None) -> bool:
        bound = self.plane.fleet.desired.adapters.get(self.request.name)
        if bound is None or digest is None or bound.digest != digest:
            return False
        if not same_path(bound.path, self.request.path):  # restarts from now on should not depend on the older files
            await self.plane.edit(edits.bind(replace(bound, path=self.request.path)))
        return True

    async def _late(self, offer: Offer, done: list[int]) -> bool:
        """The files have come into sight while replicas loaded them; then their digest must be known from now on, or a
        replica that restarts could load whatever lies there by then. False: replicas may have read other bytes than
        these, so the adapter is off them again, and is to be offered once more, with its digest."""
        self.seen = await look(self.plane, self.request.path)
        if self.seen is None or written_before(self.seen, offer.read_from):
            return True
        async with self.turn:
            await offer.take_back(done)
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

    # -- the commit ----------------------------------------------------------------------------------------------------

    async def _commit(self, offer: Offer, adapter: Adapter, done: list[int]) -> None:
        """Every replica has it: make it what the name means. Raises TransactionFailed, undone, when the replicas do not
        prove it (--verify-load), when the files have changed since they were looked at, or when the journal cannot be
        written."""
        plane = self.plane
        if plane.settings.verify_load:
            await self._verify(offer, done)
        if not await self._unchanged(adapter):
            await offer.take_back(done)
            await plane.edit(edits.reserve(adapter.upstream, None))  # nobody knows what this name stood for
            raise TransactionFailed(f"the files at {adapter.path} changed while they were loaded; undone, try again")
        reach("before-commit")
        try:
            await plane.edit(edits.bind(adapter))
        except TransactionFailed:
            await offer.take_back(done)
            raise
        reach("after-commit")

    async def _unchanged(self, adapter: Adapter) -> bool:
        """Whether the files are still those that the digest was taken of, or promised for, as far as can be seen."""
        plane, seen = self.plane, self.seen
        if seen is not None:
            return await fingerprint(plane, adapter.path) == seen.fingerprint
        now = await look(plane, adapter.path) if adapter.digest else None
        return now is None or now.digest == adapter.digest

    async def _verify(self, offer: Offer, done: list[int]) -> None:
        """Every replica's log-probabilities under the name agree, and are not the base model's."""
        plane = self.plane
        replicas = [plane.fleet.replicas[index] for index in done]
        base = plane.fleet.base_models()[0]
        try:
            self._check_provable()  # somebody may have paused the fleet while files were waited for
            why = await disagreement(plane.calls, replicas, offer.adapter, base, plane.settings.admin_timeout_secs)
        except Conflict:
            await offer.take_back(done)
            raise
        self.watch.lap("verify")
        if why is not None:
            await offer.take_back(done)
            raise TransactionFailed(f"loading {self.request.name!r} was undone: {why[0]}", why[1])
