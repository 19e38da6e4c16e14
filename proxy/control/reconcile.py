"""The only loop: look at each replica, plan what it lacks, do it, and say when it may serve.

One task a replica, so that a slow one delays nobody. A look is one tick (`probe_secs`, sooner after something changed);
a replica that is behind is looked at again at once after each action, with a growing pause when it does not get on. A
replica is admitted (CAUGHT_UP) only by a look after which nothing was left to do and during which the desired state did
not change: admission and the check are one step, nobody can slip in between.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from proxy.control.acting import Actor, describe
from proxy.control.admission import unfit
from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.meeting import Meeting
from proxy.control.plan import Switch, WakeIt, fit_to_serve, intruders, plan, switches
from proxy.control.plane import Plane
from proxy.control.retirement import Retirement
from proxy.errors import LorafleetError
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.reconcile")

STRIKES = 3
"""Health checks in a row that a READY or DRAINING replica may leave unanswered; a refused connection needs no
second."""

FIRST_DELAY_SECS = 0.05
LONGEST_DELAY_SECS = 1.0


class Watched:
    """What the loop remembers of one replica between looks. `awake`: it is known not to sleep unless we sent it to."""

    __slots__ = ("awake", "delay", "strikes", "task", "wake")

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.awake = False
        self.strikes = 0
        self.delay = FIRST_DELAY_SECS
        self.task: asyncio.Task[None] | None = None


class Reconciler:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._watched: dict[int, Watched] = {}
        self._meeting = Meeting(plane)
        self._retirement = Retirement(plane)
        self._actor = Actor(plane, self._retirement)
        self._running = False

    def start(self) -> None:
        """Watch every member; call again after one was added."""
        if not self._running:
            self._running = True
            self._plane.fleet.watch(self._changed)
        for replica in self._plane.fleet.members():
            if replica.index not in self._watched:
                watched = self._watched[replica.index] = Watched()
                watched.task = asyncio.get_running_loop().create_task(self._watch(replica, watched))

    async def stop(self) -> None:
        self._running = False
        tasks = [watched.task for watched in self._watched.values() if watched.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watched.clear()

    def _changed(self) -> None:
        """Something moved: replicas on their way to READY, or that hold what is to go, are looked at now."""
        retiring = bool(self._plane.fleet.desired.retiring)
        for index, watched in self._watched.items():
            replica = self._plane.fleet.replicas[index]
            if retiring or replica.state in (State.JOINING, State.SUSPECT) or self._plane.fleet.missing(replica):
                watched.wake.set()

    async def _watch(self, replica: Replica, watched: Watched) -> None:
        settings = self._plane.settings
        while not replica.removed:
            watched.wake.clear()
            try:
                again = await self._cycle(replica, watched)
            except LorafleetError as error:
                logger.warning("replica %d: %s", replica.index, error.message)
                again = True
            except Exception:
                logger.exception("replica %d: the reconciler stumbled and goes on", replica.index)
                again = True
            if again:
                wait = watched.delay * random.uniform(0.8, 1.2)
                watched.delay = min(watched.delay * 1.6, LONGEST_DELAY_SECS)
            else:
                wait, watched.delay = settings.probe_secs, FIRST_DELAY_SECS
            try:
                async with asyncio.timeout(wait):
                    await watched.wake.wait()
                    # A change wakes many at once, and a look takes a while: let what belongs together come together.
                    await asyncio.sleep(0.01)
            except TimeoutError:
                pass

    # -- one look ------------------------------------------------------------------------------------------------------

    async def _cycle(self, replica: Replica, watched: Watched) -> bool:
        """Look, plan, act. True when the replica should be looked at again soon."""
        plane, fleet, settings = self._plane, self._plane.fleet, self._plane.settings
        endpoint, index = replica.endpoint, replica.index
        if not await self._alive(replica, watched):
            self._meeting.saw(index, None)
            return replica.state is not State.DOWN or replica.index not in fleet.ready_once
        version, changes, busy_before = fleet.desired.version, plane.queue.changes, plane.busy
        asleep = replica.asleep or not watched.awake or fleet.desired.asleep is not None
        seen = await plane.calls.observe(endpoint, settings.health_timeout_secs, sleep=asleep)
        if isinstance(seen, Answer):
            self._probe_failed(replica, watched, f"/v1/models: {seen.message}", sure=False)
            return True
        watched.strikes = 0
        quiet = not busy_before and plane.queue.changes == changes and fleet.desired.version == version
        if quiet or replica.state in (State.JOINING, State.DOWN, State.SUSPECT):
            fleet.observed(index, seen.adapters, paused=seen.paused)
        if replica.facts is None or replica.state is State.DOWN or replica.facts.base_models != seen.base_models:
            fleet.learn(index, await plane.calls.facts(endpoint, seen, settings.health_timeout_secs))
        clean = await self._meeting.empty_cache(replica)
        self._meeting.saw(index, seen)
        if not await self._meeting.adopt():
            return True
        if replica.state is State.DRAINING:
            return await self._switch_only(replica, watched, seen, quiet)
        reason = unfit(replica, fleet.members(), len(fleet.desired.adapters))
        if reason is not None:
            fleet.apply(index, Event.DRIFTED, reason)
            fleet.set_error(index, reason)
            return True
        if not clean:
            return True
        return await self._converge(replica, watched, seen, version, quiet)

    async def _converge(self, replica: Replica, watched: Watched, seen: Observed, version: int, quiet: bool) -> bool:
        plane, fleet, index = self._plane, self._plane.fleet, replica.index
        if intruders(fleet.desired, seen):
            fleet.set_epoch(index, fleet.desired.cache_epoch - 1)  # an epoch long past: its cache must be emptied
        actions = plan(
            fleet.desired,
            seen,
            cache_epoch=replica.cache_epoch,
            sleeps=self._sleeps(replica, watched, seen),
            pending=plane.pending,
            busy=self._retirement.draining(),
            tainted=replica.tainted,
        )
        if fit_to_serve(actions):
            if fleet.desired.version == version and not (replica.state is State.READY and not quiet):
                fleet.set_epoch(index, fleet.desired.cache_epoch)
                fleet.apply(index, Event.CAUGHT_UP)
        elif replica.state is State.READY:
            if not quiet:  # a running change explains what was seen; look again when it is over
                return True
            fleet.apply(index, Event.DRIFTED, f"behind: {describe(actions[0])}")
        elif replica.state in (State.DOWN, State.SUSPECT):
            fleet.apply(index, Event.DRIFTED)
        for action in actions:
            if not await self._actor.act(replica, action):
                return True
            watched.awake = watched.awake or isinstance(action, WakeIt)
        await self._retirement.finish()
        return bool(actions)

    async def _switch_only(self, replica: Replica, watched: Watched, seen: Observed, quiet: bool) -> bool:
        """A replica that drains finishes what it has: it is paused and resumed with the others, no more."""
        wanted: list[Switch] = []
        if quiet:
            wanted = list(switches(self._plane.fleet.desired, seen, self._sleeps(replica, watched, seen)))
        for action in wanted:
            if not await self._actor.act(replica, action):
                return True
        return bool(wanted)

    def _sleeps(self, replica: Replica, watched: Watched, seen: Observed) -> bool | None:
        """Whether it was put to sleep; None when nobody knows: a paused replica says that it sleeps in any case."""
        watched.awake = watched.awake or seen.asleep is not True
        return True if replica.asleep else False if watched.awake else None

    async def _alive(self, replica: Replica, watched: Watched) -> bool:
        answer = await self._plane.calls.health(replica.endpoint, self._plane.settings.health_timeout_secs)
        if answer.ok:
            return True
        said = f"/health answered {answer.status}" if answer.status is not None else answer.message
        self._probe_failed(replica, watched, said, sure=answer.outcome is Outcome.UNREACHABLE)
        return False

    def _probe_failed(self, replica: Replica, watched: Watched, reason: str, *, sure: bool) -> None:
        watched.strikes += 1
        fleet = self._plane.fleet
        patience = STRIKES if replica.state in (State.READY, State.DRAINING) else 2  # both have work
        if sure or watched.strikes >= patience:
            fleet.apply(replica.index, Event.PROBE_FAILED, reason)
        else:
            fleet.set_error(replica.index, reason)
