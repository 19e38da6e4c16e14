"""What switches the whole fleet: pause and resume (see `pausing`), sleep and wake, cache reset, abort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import msgspec

from proxy.control import edits
from proxy.control.answers import Observed, Outcome
from proxy.control.asking import broadcast, look, participants, put_back, release, switch
from proxy.control.failpoints import reach
from proxy.control.loading import Verdict
from proxy.control.pausing import Pausing
from proxy.control.plane import Plane
from proxy.control.queue import Stopwatch
from proxy.control.transaction import Said, Seat
from proxy.errors import TransactionFailed


class Switches:
    """Queued like every other change; each returns the JSON body that vLLM would answer."""

    def __init__(self, plane: Plane, on_lease_expired: Callable[[], None] = lambda: None) -> None:
        self._plane = plane
        self._pausing = Pausing(plane, on_lease_expired)
        self.is_paused = self._pausing.is_paused
        self.pause = self._pausing.pause
        self.resume = self._pausing.resume
        self.arm_lease = self._pausing.lease.arm
        self.stop = self._pausing.lease.stop

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def sleep(self, query: str) -> dict[str, Any]:
        return await self._plane.queue.one_at_a_time(
            "sleep", None, ("sleep", query), lambda watch: self._sleep(query, watch)
        )

    async def _sleep(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        await self._pausing.make_real(watch)
        target = f"/sleep?{query}" if query else "/sleep"

        async def ask(index: int) -> Verdict:
            verdict = await switch(plane, index, target, lambda seen: seen.asleep)
            if verdict.said is Said.OK:
                fleet.set_asleep(index, True)
                fleet.forget_cache(index)
            return verdict

        result = await broadcast(plane, await participants(plane), ask=ask, undo=self._wake_on)
        watch.lap("sleep")
        if not result.committed:
            raise result.failure("putting the fleet to sleep")
        try:
            await plane.edit(edits.sleep(query))
        except TransactionFailed:
            await put_back(plane, result.where(Seat.DONE), self._wake_on)
            raise
        return {}

    async def wake_up(self, query: str) -> dict[str, Any]:
        """Wake every replica; with `tags` only a part of each, and the fleet sleeps on until the last part is awake."""
        return await self._plane.queue.one_at_a_time(
            "wake_up", None, ("wake_up", query), lambda watch: self._wake(query, watch)
        )

    async def _wake(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane = self._plane

        async def ask(index: int) -> Verdict:
            return await self._wake_on(index, query)

        await release(plane, "waking", await participants(plane), ask)
        watch.lap("wake")
        if not any(replica.asleep for replica in plane.fleet.ready()):
            await plane.edit(edits.sleep(None))
        return {}

    async def _wake_on(self, index: int, query: str = "") -> Verdict:
        target = f"/wake_up?{query}" if query else "/wake_up"
        plane = self._plane
        verdict = await switch(plane, index, target, lambda seen: seen.asleep is False)
        if verdict.said is Said.OK:
            seen = await look(plane, index) if "tags" in parse_qs(query) else None
            if not (isinstance(seen, Observed) and seen.asleep):
                plane.fleet.set_asleep(index, False)
                plane.fleet.set_paused(index, False)  # waking resumes the scheduler as well
        return verdict

    # -- what cannot be undone -----------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, query: str) -> dict[str, Any]:
        """Empty every prefix cache. `success` is true only when every replica says so: while anything runs vLLM answers
        200 with false and resets nothing (observed on 0.27.1)."""
        return await self._plane.queue.one_at_a_time(
            "reset", None, ("reset", query), lambda watch: self._reset(query, watch)
        )

    async def _reset(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        await self._pausing.make_real(watch)
        target = f"/reset_prefix_cache?{query}" if query else "/reset_prefix_cache"
        bodies = await self._collect("resetting the prefix caches", target, b"", watch)
        emptied = [index for index, body in bodies.items() if body.get("success") is not False]
        for index in emptied:
            fleet.forget_cache(index)
        success = len(emptied) == len(bodies)
        if success:
            epoch = fleet.desired.cache_epoch
            for index in emptied:
                fleet.set_epoch(index, epoch + 1)
            missed = {replica.endpoint.base for replica in fleet.members() if replica.index not in emptied}
            try:
                await plane.edit(edits.next_epoch(missed))
            except TransactionFailed:
                for index in emptied:
                    fleet.set_epoch(index, epoch)
                raise
        return {"success": success}

    async def abort_requests(self, body: bytes) -> dict[str, Any]:
        """Abort the named requests, or all, wherever they run."""
        return await self._plane.queue.one_at_a_time(
            "abort", None, ("abort", body), lambda watch: self._abort(body, watch)
        )

    async def _abort(self, body: bytes, watch: Stopwatch) -> dict[str, Any]:
        bodies = await self._collect("aborting requests", "/abort_requests", body or b"{}", watch)
        counts = [answer.get("aborted") for answer in bodies.values()]
        return {"status": "aborted", "aborted": sum(count for count in counts if isinstance(count, int))}

    async def _collect(self, what: str, target: str, body: bytes, watch: Stopwatch) -> dict[int, dict[str, Any]]:
        """POST to all; the JSON body of each. Raises TransactionFailed when one refuses: this cannot be undone."""
        plane = self._plane
        bodies: dict[int, dict[str, Any]] = {}

        async def ask(index: int) -> Verdict:
            endpoint = plane.fleet.replicas[index].endpoint
            answer = await plane.calls.post(endpoint, target, plane.settings.admin_timeout_secs, body)
            reach("after-collect")
            if answer.ok:
                bodies[index] = _object(answer.body)
                return Verdict(Said.OK, answer.of(index))
            if answer.outcome in (Outcome.UNREACHABLE, Outcome.NO_ANSWER):
                return Verdict(Said.GONE, answer.of(index))
            return Verdict(Said.REFUSED, answer.of(index))

        result = await broadcast(plane, await participants(plane), ask=ask, undo=None)
        watch.lap("broadcast")
        if not result.committed:
            failed = result.failure(what)
            done = ", ".join(map(str, result.where(Seat.DONE))) or "none"
            raise TransactionFailed(
                f"{what} failed and cannot be undone (done on replica: {done})",
                failed.answers,
                status=failed.status,
                undone=False,
            )
        return bodies


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
