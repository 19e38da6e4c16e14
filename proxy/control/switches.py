"""Pause, resume, sleep, wake, cache reset, abort: the changes that switch the whole fleet."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from proxy.control import journal as edits
from proxy.control.answers import Observed, Outcome
from proxy.control.desired import Pause
from proxy.control.failpoints import reach
from proxy.control.journal import Line
from proxy.control.loading import Verdict
from proxy.control.plane import Plane, Stopwatch, failure
from proxy.control.runner import Call
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.control.versions import loads_are_safe
from proxy.errors import ReplicaAnswer, TransactionFailed

if TYPE_CHECKING:
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.control")

RELEASE_TRIES = 2

LEASE_GRACE_SECS = 0.5
"""A timer may ring a little early, and the wall clock is another clock."""


class Switches:
    """Queued like every other change; each returns the JSON body that vLLM would answer."""

    def __init__(self, plane: Plane, on_lease_expired: Callable[[], None] = lambda: None) -> None:
        self._plane = plane
        self._on_lease_expired = on_lease_expired
        self._lease_timer: asyncio.TimerHandle | None = None

    # -- pause ---------------------------------------------------------------------------------------------------------

    def is_paused(self) -> bool:
        """Whether a client was told that the fleet is paused (a lazy pause counts)."""
        return self._plane.fleet.desired.pause is not None

    async def pause(self, query: str) -> dict[str, Any]:
        """Pause every replica that may serve, or none. `query` goes to them as it is.

        With the lazy setting a keep-pause is only remembered: adapters have names of their own per version, so a load
        needs no pause, and a real one empties the prefix cache and prefills again all that runs (observed on 0.27.1).
        """
        return await self._plane.one_at_a_time("pause", None, ("pause", query), lambda watch: self._pause(query, watch))

    async def _pause(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        lazy = plane.settings.lazy_pause and _mode(query) == "keep" and self._loads_are_safe()
        held = fleet.desired.pause
        real = not lazy or (held is not None and held.real)
        pause = Pause(query, plane.wall(), real)
        if real:
            await self._pause_for_real(pause, watch)
        else:
            await plane.edit(edits.pause(pause))
        watch.lap("commit")
        self.arm_lease()
        return {"status": "paused"}

    async def _pause_for_real(self, pause: Pause, watch: Stopwatch) -> None:
        """Every replica, then the desired state; a fleet that was running goes on when that fails."""
        plane, fleet = self._plane, self._plane.fleet
        replicas = await plane.participants()
        await plane.freshening.settled()
        query = pause.query
        target = f"/pause?{query}" if query else "/pause"
        held = fleet.desired.pause
        was_paused = held is not None and held.real

        async def ask(index: int) -> Verdict:
            verdict = await plane.switch(index, target, lambda seen: seen.paused)
            if verdict.said is Said.OK:
                fleet.set_paused(index, True)
                if _clears(query):
                    fleet.forget_cache(index)
            return verdict

        async def undo(index: int) -> Verdict:
            if was_paused:
                return Verdict(Said.OK, ReplicaAnswer(index, None, "was paused before"))
            return await self._resume_on(index)

        transaction, verdicts = await plane.broadcast(replicas, ask=ask, undo=undo)
        watch.lap("pause")
        if transaction.phase is not Phase.COMMITTED:
            raise failure("pausing", transaction, verdicts)
        await self._edit_or_undo(edits.pause(pause), transaction, undo)

    async def _edit_or_undo(self, line: Line, transaction: Transaction, undo: Call) -> None:
        """Write down what every replica has done. Raises TransactionFailed, undone, when the journal takes no more."""
        try:
            await self._plane.edit(line)
        except TransactionFailed:
            await asyncio.gather(*(undo(index) for index in transaction.where(Seat.DONE)))
            raise

    def _loads_are_safe(self) -> bool:
        """Whether every replica's version can load an adapter while others decode; if not, a pause is a real one."""
        for replica in self._plane.fleet.members():
            if replica.facts is not None and not loads_are_safe(replica.facts.version):
                logger.warning("replica %d has vLLM %s: pausing for real", replica.index, replica.facts.version)
                return False
        return True

    async def make_real(self, watch: Stopwatch) -> None:
        """A lazy pause becomes a real one, because a call that changes weights has come."""
        held = self._plane.fleet.desired.pause
        if held is not None and not held.real:
            await self._pause_for_real(Pause(held.query, held.since, real=True), watch)

    async def resume(self) -> dict[str, Any]:
        """End a pause everywhere. A replica that will not resume stops being routable until it does."""
        return await self._plane.one_at_a_time("resume", None, ("resume",), self._resume)

    async def _resume(self, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        held = fleet.desired.pause
        if fleet.desired.asleep is None and (held is None or held.real):  # an engine without weights must not go on
            await self._release("resuming", await plane.participants(), self._resume_on, watch)
        if held is not None:
            await plane.edit(edits.pause(None))
            watch.lap("commit")
        self.arm_lease()
        return {"status": "resumed"}

    async def _resume_on(self, index: int) -> Verdict:
        verdict = await self._plane.switch(index, "/resume", lambda seen: seen.paused is False)
        if verdict.said is Said.OK:
            self._plane.fleet.set_paused(index, False)
        return verdict

    async def _release(self, what: str, replicas: list[Replica], ask: Callable[[int], Any], watch: Stopwatch) -> None:
        """Resume or wake. Freezing the fleet again because one replica will not come back would end the run, so that
        replica is left out (not routable until the reconciler has put it right) and the others go on."""

        async def insist(index: int) -> Verdict:
            for _ in range(RELEASE_TRIES - 1):
                verdict: Verdict = await ask(index)
                if verdict.said is not Said.REFUSED:
                    return verdict
            verdict = await ask(index)
            if verdict.said is Said.REFUSED:
                refused[index] = verdict
                return Verdict(Said.GONE, verdict.answer)
            return verdict

        refused: dict[int, Verdict] = {}
        transaction, verdicts = await self._plane.broadcast(replicas, ask=insist, undo=None)
        watch.lap(what)
        if transaction.phase is not Phase.COMMITTED:
            raise failure(what, transaction, {**verdicts, **refused})

    # -- the lease -----------------------------------------------------------------------------------------------------

    def arm_lease(self) -> None:
        """(Re)start the clock after which a pause that nobody ended is ended. Also called once at the start."""
        if self._lease_timer is not None:
            self._lease_timer.cancel()
            self._lease_timer = None
        pause, lease = self._plane.fleet.desired.pause, self._plane.settings.pause_lease_secs
        if pause is not None and lease > 0:
            left = max(0.0, pause.since + lease - self._plane.wall())
            self._lease_timer = asyncio.get_running_loop().call_later(left, self._lease_over)

    def _lease_over(self) -> None:
        lease = self._plane.settings.pause_lease_secs
        logger.warning("a pause was not ended within %g s (--pause-lease-secs); resuming", lease)
        self._on_lease_expired()
        self._plane.keep(asyncio.get_running_loop().create_task(self._resume_for_lease()))

    def _overdue(self) -> bool:
        """Whether the pause in force now has outlived its lease: not one that began since the timer rang."""
        pause, lease = self._plane.fleet.desired.pause, self._plane.settings.pause_lease_secs
        return pause is not None and lease > 0 and self._plane.wall() >= pause.since + lease - LEASE_GRACE_SECS

    async def _resume_for_lease(self) -> None:
        """Keeps trying: a pause that the lease cannot end would be frozen for good."""

        async def change(watch: Stopwatch) -> None:
            if self._overdue():
                await self._resume(watch)

        while self._overdue():
            try:
                await self._plane.one_at_a_time("resume", None, ("lease over",), change)
            except Exception as error:
                logger.warning("the pause could not be ended yet: %s", error)
                await asyncio.sleep(1.0)

    def stop(self) -> None:
        if self._lease_timer is not None:
            self._lease_timer.cancel()

    # -- sleep ---------------------------------------------------------------------------------------------------------

    async def sleep(self, query: str) -> dict[str, Any]:
        return await self._plane.one_at_a_time("sleep", None, ("sleep", query), lambda w: self._sleep(query, w))

    async def _sleep(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        await self.make_real(watch)
        target = f"/sleep?{query}" if query else "/sleep"

        async def ask(index: int) -> Verdict:
            verdict = await plane.switch(index, target, lambda seen: seen.asleep)
            if verdict.said is Said.OK:
                fleet.set_asleep(index, True)
                fleet.forget_cache(index)
            return verdict

        transaction, verdicts = await plane.broadcast(await plane.participants(), ask=ask, undo=self._wake_on)
        watch.lap("sleep")
        if transaction.phase is not Phase.COMMITTED:
            raise failure("putting the fleet to sleep", transaction, verdicts)
        await self._edit_or_undo(edits.sleep(query), transaction, self._wake_on)
        return {}

    async def wake_up(self, query: str) -> dict[str, Any]:
        """Wake every replica; with `tags` only a part of each, and the fleet sleeps on until the last part is awake."""
        return await self._plane.one_at_a_time("wake_up", None, ("wake_up", query), lambda w: self._wake(query, w))

    async def _wake(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane = self._plane

        async def ask(index: int) -> Verdict:
            return await self._wake_on(index, query)

        await self._release("waking", await plane.participants(), ask, watch)
        if not any(replica.asleep for replica in plane.fleet.ready()):
            await plane.edit(edits.sleep(None))
        return {}

    async def _wake_on(self, index: int, query: str = "") -> Verdict:
        target = f"/wake_up?{query}" if query else "/wake_up"
        plane = self._plane
        verdict = await plane.switch(index, target, lambda seen: seen.asleep is False)
        if verdict.said is Said.OK:
            seen = await plane.look(index) if "tags" in parse_qs(query) else None
            if not (isinstance(seen, Observed) and seen.asleep):
                plane.fleet.set_asleep(index, False)
                plane.fleet.set_paused(index, False)  # waking resumes the scheduler as well
        return verdict

    # -- what cannot be undone -----------------------------------------------------------------------------------------

    async def reset_prefix_cache(self, query: str) -> dict[str, Any]:
        """Empty every prefix cache. `success` is true only when every replica says so: while anything runs vLLM answers
        200 with false and resets nothing (observed on 0.27.1)."""
        return await self._plane.one_at_a_time("reset", None, ("reset", query), lambda watch: self._reset(query, watch))

    async def _reset(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        await self.make_real(watch)
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
        return await self._plane.one_at_a_time("abort", None, ("abort", body), lambda w: self._abort(body, w))

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

        transaction, verdicts = await plane.broadcast(await plane.participants(), ask=ask, undo=None)
        watch.lap("broadcast")
        if transaction.phase is not Phase.COMMITTED:
            failed = failure(what, transaction, verdicts)
            done = ", ".join(str(i) for i in transaction.where(Seat.DONE)) or "none"
            raise TransactionFailed(
                f"{what} failed and cannot be undone (done on replica: {done})",
                failed.answers,
                status=failed.status,
                undone=False,
            )
        return bodies


def _mode(query: str) -> str:
    return parse_qs(query).get("mode", ["abort"])[-1]


def _clears(query: str) -> bool:
    """Whether vLLM 0.27.1 empties the prefix cache at this pause: always, unless told not to."""
    return parse_qs(query).get("clear_cache", ["true"])[-1].lower() not in ("false", "0", "no", "off")


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}
