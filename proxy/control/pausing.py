"""Pause and resume: the fleet stands still as a whole, or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

from proxy.control import edits
from proxy.control.asking import broadcast, participants, put_back, release, switch
from proxy.control.desired import Pause
from proxy.control.loading import Verdict
from proxy.control.pause_lease import PauseLease
from proxy.control.plane import Plane
from proxy.control.queue import Stopwatch
from proxy.control.transaction import Said, Seat
from proxy.control.versions import loads_are_safe
from proxy.errors import ReplicaAnswer, TransactionFailed

logger = logging.getLogger("lorafleet.control")


class Pausing:
    """Queued like every other change; each returns the JSON body that vLLM would answer."""

    def __init__(self, plane: Plane, on_lease_expired: Callable[[], None]) -> None:
        self._plane = plane
        self.lease = PauseLease(plane, self._resume, on_lease_expired)

    def is_paused(self) -> bool:
        """Whether a client was told that the fleet is paused (a lazy pause counts)."""
        return self._plane.fleet.desired.pause is not None

    async def pause(self, query: str) -> dict[str, Any]:
        """Pause every replica that may serve, or none. `query` goes to them as it is.

        With the lazy setting a keep-pause is only remembered: adapters have names of their own per version, so a load
        needs no pause, and a real one empties the prefix cache and prefills again all that runs (observed on 0.27.1).
        """
        return await self._plane.queue.one_at_a_time(
            "pause", None, ("pause", query), lambda watch: self._pause(query, watch)
        )

    async def _pause(self, query: str, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        lazy = plane.settings.lazy_pause and mode(query) == "keep" and self._loads_are_safe()
        held = fleet.desired.pause
        real = not lazy or (held is not None and held.real)
        pause = Pause(query, plane.wall(), real)
        if real:
            await self._pause_for_real(pause, watch)
        else:
            await plane.edit(edits.pause(pause))
        watch.lap("commit")
        self.lease.arm()
        return {"status": "paused"}

    async def _pause_for_real(self, pause: Pause, watch: Stopwatch) -> None:
        """Every replica, then the desired state; a fleet that was running goes on when that fails."""
        plane, fleet = self._plane, self._plane.fleet
        replicas = await participants(plane)
        await plane.freshening.settled()
        query = pause.query
        target = f"/pause?{query}" if query else "/pause"
        held = fleet.desired.pause
        was_paused = held is not None and held.real

        async def ask(index: int) -> Verdict:
            verdict = await switch(plane, index, target, lambda seen: seen.paused)
            if verdict.said is Said.OK:
                fleet.set_paused(index, True)
                if clears(query):
                    fleet.forget_cache(index)
            return verdict

        async def undo(index: int) -> Verdict:
            if was_paused:
                return Verdict(Said.OK, ReplicaAnswer(index, None, "was paused before"))
            return await self._resume_on(index)

        result = await broadcast(plane, replicas, ask=ask, undo=undo)
        watch.lap("pause")
        if not result.committed:
            raise result.failure("pausing")
        try:
            await plane.edit(edits.pause(pause))
        except TransactionFailed:
            await put_back(plane, result.where(Seat.DONE), undo)
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
        return await self._plane.queue.one_at_a_time("resume", None, ("resume",), self._resume)

    async def _resume(self, watch: Stopwatch) -> dict[str, Any]:
        plane, fleet = self._plane, self._plane.fleet
        held = fleet.desired.pause
        if fleet.desired.asleep is None and (held is None or held.real):  # an engine without weights must not go on
            replicas = await participants(plane)
            await release(plane, "resuming", replicas, self._resume_on)
            watch.lap("resume")
        if held is not None:
            await plane.edit(edits.pause(None))
            watch.lap("commit")
        self.lease.arm()
        return {"status": "resumed"}

    async def _resume_on(self, index: int) -> Verdict:
        verdict = await switch(self._plane, index, "/resume", lambda seen: seen.paused is False)
        if verdict.said is Said.OK:
            self._plane.fleet.set_paused(index, False)
        return verdict


def mode(query: str) -> str:
    return parse_qs(query).get("mode", ["abort"])[-1]


def clears(query: str) -> bool:
    """Whether vLLM 0.27.1 empties the prefix cache at this pause: always, unless told not to."""
    return parse_qs(query).get("clear_cache", ["true"])[-1].lower() not in ("false", "0", "no", "off")
