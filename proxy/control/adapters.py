"""Loading and unloading adapters over the fleet: the two changes that decide which weights a name means."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.control import journal as edits
from proxy.control import slots
from proxy.control.adapter_files import NAME, Seen, check_name, check_path
from proxy.control.arrival import arrived, late_digest
from proxy.control.desired import Adapter, choose_upstream
from proxy.control.failpoints import reach
from proxy.control.loading import Loading, Verdict
from proxy.control.plan import same_path
from proxy.control.plane import Plane, Stopwatch, failure
from proxy.control.restoring import restore
from proxy.control.transaction import Phase, Said, Seat
from proxy.control.verify import disagreement
from proxy.errors import BadRequest, Conflict, NotFound, ReplicaAnswer, TransactionFailed
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.control")


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`digest` is what the client says the weights are, None when it did not say."""

    name: str
    path: str
    digest: str | None = None


class AdapterChanges:
    """Load and unload. Both are queued behind every other change and survive the client that asked."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane

    # -- load ----------------------------------------------------------------------------------------------------------

    async def load(self, name: object, path: object, digest: object = None) -> str:
        """Bind a name to the weights at a path on every replica that may serve; returns vLLM's own sentence.

        Raises BadRequest, Conflict (no slot), Unavailable (no replica), TransactionFailed (undone).
        """
        plane = self._plane
        request = LoadRequest(
            check_name(name, plane.fleet.base_models()),
            await plane.in_thread(check_path, path, plane.settings.adapter_roots),
            _check_digest(digest),
        )
        # The files are part of the key: a request for what has been written since is not the same request.
        key = ("load", request, await plane.in_thread(plane.files.fingerprint, request.path))
        return await self._plane.one_at_a_time("load", request.name, key, lambda watch: self._load(request, watch))

    async def _load(self, request: LoadRequest, watch: Stopwatch) -> str:
        plane, fleet = self._plane, self._plane.fleet
        name, path = request.name, request.path
        success = f"Success: LoRA adapter '{name}' added successfully."
        deadline = asyncio.get_running_loop().time() + plane.settings.load_deadline_secs
        seen = await arrived(plane, path, request.digest, deadline)
        reach("after-files")
        watch.lap("files")
        digest = request.digest or (seen.digest if seen else None)
        bound = fleet.desired.adapters.get(name)
        if bound is not None and digest is not None and bound.digest == digest:
            if not same_path(bound.path, path):  # what restarts from now on should not depend on the older files
                await plane.edit(edits.bind(replace(bound, path=path)))
            return success
        replicas = await plane.participants()
        check_name(name, fleet.base_models())  # they may have become known only now
        began = plane.wall()
        await self._make_room(name)
        conflict: set[str] = set()
        for _ in range(3):
            upstream = self._choose(name, digest, frozenset(conflict))
            adapter = Adapter(name, path, digest, upstream)
            plane.pending.add(upstream)
            try:
                if await self._load_everywhere(adapter, replicas, deadline, watch):
                    if digest is None:
                        adapter = replace(adapter, digest=await late_digest(plane, path, began))
                    await self._commit(adapter, seen, replicas)
                    watch.lap("commit")
                    return success
            finally:
                plane.pending.discard(upstream)
            conflict.add(upstream)
        raise TransactionFailed(
            f"{name!r} is listed on a replica under weights that nobody knows, and cannot be replaced"
        )

    async def _commit(self, adapter: Adapter, seen: Seen | None, replicas: list[Replica]) -> None:
        """Every replica has it: make it what the name means. Raises TransactionFailed, undone, when the files have
        changed since they were looked at or the journal cannot be written."""
        plane = self._plane
        if not await self._unchanged(adapter, seen):
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

    async def _unchanged(self, adapter: Adapter, seen: Seen | None) -> bool:
        """Whether the files are still those that the digest was taken of, or promised for, as far as can be seen."""
        plane = self._plane
        if seen is not None:
            return bool(await plane.in_thread(plane.files.fingerprint, adapter.path) == seen.fingerprint)
        now: Seen | None = await plane.in_thread(plane.files.look, adapter.path) if adapter.digest else None
        return now is None or now.digest == adapter.digest

    async def _make_room(self, name: str) -> None:
        """Retire what an earlier run left when slots are short. Raises Conflict with the numbers."""
        fleet = self._plane.fleet
        max_loras = fleet.max_loras()
        room = slots.to_make_room(fleet.desired, name, max_loras, fleet.running)
        if room is None:
            assert max_loras is not None
            raise Conflict(slots.refusal(fleet.desired, name, max_loras, fleet.running), param="lora_name")
        for adapter in room:
            logger.warning("retiring %s, which an earlier run left, to make room for %s", adapter.name, name)
            await self._retire(adapter)

    def _choose(self, name: str, digest: str | None, conflict: frozenset[str]) -> str:
        fleet = self._plane.fleet
        desired = fleet.desired
        members = fleet.members()
        held = {upstream for replica in members for upstream in replica.holds}
        foreign = {upstream for upstream in held if desired.by_upstream(upstream) is None}
        unsure = {upstream for replica in members for upstream in replica.tainted}
        if any(replica.stale_cache and replica.facts is not None for replica in members):
            foreign.add(name)
        seen = frozenset(foreign | unsure | conflict | self._plane.leaving.keys())
        return choose_upstream(desired, name, digest, seen=seen, nonce=secrets.token_hex(6))

    async def _load_everywhere(
        self, adapter: Adapter, replicas: list[Replica], deadline: float, watch: Stopwatch
    ) -> bool:
        """False when a replica listed the upstream name already: another must be chosen. Raises TransactionFailed."""
        plane, fleet = self._plane, self._plane.fleet
        used = fleet.desired.used
        if adapter.upstream not in used or used[adapter.upstream] != adapter.digest:
            await plane.edit(edits.reserve(adapter.upstream, adapter.digest))
        reach("after-reserve")
        await plane.freshening.freshen(replicas, loading=adapter.upstream, instead_of=adapter.name)
        abandoned = False

        async def ask(index: int) -> Verdict:
            nonlocal abandoned
            replica = fleet.replicas[index]
            loading = Loading(
                plane.calls,
                index,
                replica.endpoint,
                adapter.upstream,
                adapter.path,
                frozenset(replica.holds),
                deadline,
                plane.settings.load_deadline_secs,
                lambda: abandoned,
                ours=adapter.upstream in replica.holds,  # only one that retires is (see _choose)
            )
            reach("before-load")
            verdict = await loading.run()
            reach("after-load")
            if verdict.said is Said.OK:
                fleet.held(index, adapter.upstream, adapter.path)
                return verdict
            if verdict.unsure:
                fleet.taint(index, adapter.upstream, "the answer to a load was lost")
            abandoned = abandoned or verdict.said is Said.REFUSED
            return verdict

        async def undo(index: int) -> Verdict:
            return await self._undo_on(index, adapter)

        transaction, verdicts = await plane.broadcast(replicas, ask=ask, undo=undo, canary=True)
        watch.lap("load")
        if transaction.phase is Phase.COMMITTED:
            if plane.settings.verify_load:
                await self._verify(adapter, [fleet.replicas[i] for i in transaction.where(Seat.DONE)], watch)
            return True
        if any(verdict.conflict for verdict in verdicts.values()):
            return False
        raise _load_failure(adapter, transaction.phase, verdicts) or failure(
            f"loading {adapter.name!r}", transaction, verdicts
        )

    async def _verify(self, adapter: Adapter, replicas: list[Replica], watch: Stopwatch) -> None:
        """--verify-load: every replica's log-probabilities under the name agree, and are not the base model's."""
        base = self._plane.fleet.base_models()[0]
        why = await disagreement(self._plane.calls, replicas, adapter, base, self._plane.settings.admin_timeout_secs)
        watch.lap("verify")
        if why is not None:
            await self._take_back(adapter, replicas)
            raise TransactionFailed(f"loading {adapter.name!r} was undone: {why[0]}", why[1])

    async def _take_back(self, adapter: Adapter, replicas: list[Replica]) -> None:
        await asyncio.gather(*(self._undo_on(replica.index, adapter) for replica in replicas))

    async def _undo_on(self, index: int, adapter: Adapter) -> Verdict:
        """Take a name that was not committed off one replica; one that was there before, retiring, stays."""
        if self._plane.fleet.desired.by_upstream(adapter.upstream) is not None:
            return Verdict(Said.OK, ReplicaAnswer(index, None, "held it before"))
        verdict = await self._plane.take_off(index, adapter.upstream)
        if verdict.said is not Said.OK:
            self._plane.fleet.taint(index, adapter.upstream, "a load could not be undone")
        return verdict

    # -- unload --------------------------------------------------------------------------------------------------------

    async def unload(self, name: object) -> str:
        """Take a name away: from clients at once, from the replicas when nothing runs under it any more.

        Raises NotFound, Unavailable, TransactionFailed (the name stays usable).
        """
        if not isinstance(name, str) or not name:
            raise BadRequest("lora_name must be a non-empty string", param="lora_name")
        if not NAME.fullmatch(name):
            raise NotFound("no lora adapter can have this name", param="lora_name")
        return await self._plane.one_at_a_time(
            "unload", name, ("unload", name), lambda watch: self._unload(name, watch)
        )

    async def _unload(self, name: str, watch: Stopwatch) -> str:
        fleet = self._plane.fleet
        adapter = fleet.desired.adapters.get(name)
        if adapter is None:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        success = f"Success: LoRA adapter '{name}' removed successfully."
        fleet.close(name)
        try:
            if fleet.running.get(adapter.upstream):
                await self._retire(adapter)
                watch.lap("retire")
            else:
                await self._unload_everywhere(adapter, watch)
        finally:
            fleet.reopen(name)
        return success

    async def _unload_everywhere(self, adapter: Adapter, watch: Stopwatch) -> None:
        """Take an idle binding off every replica that may serve, or leave it on all. Raises TransactionFailed."""
        plane, fleet = self._plane, self._plane.fleet
        if self._keeps_away(adapter):
            await self._retire(adapter)
            return
        replicas = await plane.participants()

        async def ask(index: int) -> Verdict:
            return await plane.take_off(index, adapter.upstream)

        async def undo(index: int) -> Verdict:
            answer = await restore(plane, index, adapter, plane.settings.admin_timeout_secs)
            return Verdict(Said.OK if answer.ok else Said.REFUSED, answer.of(index))

        transaction, verdicts = await plane.broadcast(replicas, ask=ask, undo=undo)
        watch.lap("unload")
        if transaction.phase is not Phase.COMMITTED:
            raise failure(f"unloading {adapter.name!r}", transaction, verdicts)
        try:
            await plane.edit(edits.unbind(adapter))
        except TransactionFailed:
            done = list(transaction.where(Seat.DONE))
            for index, verdict in zip(done, await asyncio.gather(*map(undo, done)), strict=True):
                if verdict.said is not Said.OK:
                    fleet.apply(index, Event.DRIFTED, "could not be put back after a failed change")
            raise
        watch.lap("commit")
        plane.freshening.soon(replicas)

    def _keeps_away(self, adapter: Adapter) -> bool:
        """Whether nobody serves and a living replica lacks this adapter: perhaps for ever, its files may be lost."""
        fleet = self._plane.fleet
        joining = [replica for replica in fleet.members() if replica.state is State.JOINING]
        return not fleet.ready() and any(adapter.upstream not in replica.holds for replica in joining)

    async def _retire(self, adapter: Adapter) -> None:
        """No client can name it from now on; the reconciler takes it off the replicas when it has drained."""
        await self._plane.edit(edits.unbind(adapter))


def _check_digest(digest: object) -> str | None:
    if digest is None:
        return None
    if not isinstance(digest, str) or not 8 <= len(digest) <= 200 or not digest.isprintable():
        raise BadRequest('digest must be a string like "sha256:<hex>"', param="digest")
    return digest


def _load_failure(adapter: Adapter, phase: Phase, verdicts: dict[int, Verdict]) -> TransactionFailed | None:
    """Two failures that deserve their own words: an adapter that killed an engine, and files that never showed."""
    died = [v.answer for v in verdicts.values() if v.said is Said.DIED]
    if died and not any(v.said in (Said.OK, Said.REFUSED) for v in verdicts.values()):
        return TransactionFailed(
            f"loading {adapter.name!r} was stopped: a replica died on it, so it was not offered to the others", died
        )
    late: list[ReplicaAnswer] = [v.answer for v in verdicts.values() if "not loadable within" in v.answer.message]
    if late:
        return TransactionFailed(f"loading {adapter.name!r} failed and was undone on every replica", late, status=504)
    return None
