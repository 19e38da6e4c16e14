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

from proxy.control import journal as edits
from proxy.control.admission import unfit
from proxy.control.adoption import adoptable
from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.desired import Adapter
from proxy.control.plan import Action, Load, PauseIt, ResetCache, ResumeIt, SleepIt, Unload, WakeIt, fit_to_serve, plan
from proxy.control.plane import Plane
from proxy.errors import LorafleetError
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.reconcile")

STRIKES = 3
"""Health checks in a row that a READY replica may leave unanswered; a refused connection needs no second one."""

FIRST_DELAY_SECS = 0.05
LONGEST_DELAY_SECS = 1.0


class Watched:
    """What the loop remembers of one replica between looks."""

    __slots__ = ("delay", "strikes", "task", "wake")

    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.strikes = 0
        self.delay = FIRST_DELAY_SECS
        self.task: asyncio.Task[None] | None = None


class Reconciler:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._watched: dict[int, Watched] = {}
        self._first: dict[int, Observed | None] = {}
        self._adopted = False
        self._drain_until: dict[str, float] = {}
        self._unseen_since: dict[str, float] = {}
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
            self._first.setdefault(index, None)
            return replica.state is not State.DOWN or replica.index not in fleet.ready_once
        version, busy_before = fleet.desired.version, plane.busy
        asleep = replica.asleep or fleet.desired.asleep is not None
        seen = await plane.calls.observe(endpoint, settings.health_timeout_secs, sleep=asleep)
        if isinstance(seen, Answer):
            self._probe_failed(replica, watched, f"/v1/models: {seen.message}", sure=False)
            return True
        quiet = not plane.busy and not busy_before and fleet.desired.version == version
        if quiet or replica.state in (State.JOINING, State.DOWN, State.SUSPECT):
            fleet.observed(index, seen.adapters, paused=seen.paused)
        if replica.facts is None or replica.state is State.DOWN:
            fleet.learn(index, await plane.calls.facts(endpoint, seen, settings.health_timeout_secs))
        if replica.stale_cache or endpoint.base not in plane.known:
            await self._first_contact(replica)
        self._first.setdefault(index, seen)
        if not await self._adopt():
            return True
        if replica.state is State.DRAINING:
            return False
        reason = unfit(replica, fleet.members())
        if reason is not None:
            fleet.apply(index, Event.DRIFTED, reason)
            fleet.set_error(index, reason)
            return True
        return await self._converge(replica, seen, version, quiet)

    async def _converge(self, replica: Replica, seen: Observed, version: int, quiet: bool) -> bool:
        plane, fleet, index = self._plane, self._plane.fleet, replica.index
        actions = plan(
            fleet.desired,
            seen,
            cache_epoch=replica.cache_epoch,
            pending=plane.pending,
            busy=self._draining(),
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
            if not await self._act(replica, action):
                return True
        await self._finish_retiring()
        return bool(actions)

    async def _alive(self, replica: Replica, watched: Watched) -> bool:
        answer = await self._plane.calls.health(replica.endpoint, self._plane.settings.health_timeout_secs)
        if answer.ok:
            watched.strikes = 0
            return True
        said = f"/health answered {answer.status}" if answer.status is not None else answer.message
        self._probe_failed(replica, watched, said, sure=answer.outcome is Outcome.UNREACHABLE)
        return False

    def _probe_failed(self, replica: Replica, watched: Watched, reason: str, *, sure: bool) -> None:
        watched.strikes += 1
        fleet = self._plane.fleet
        if sure or watched.strikes >= (STRIKES if replica.state is State.READY else 2):
            fleet.apply(replica.index, Event.PROBE_FAILED, reason)
        else:
            fleet.set_error(replica.index, reason)

    # -- first contact -------------------------------------------------------------------------------------------------

    async def _first_contact(self, replica: Replica) -> None:
        """A replica whose past no journal tells may hold cached blocks under any name: empty its cache once, or treat
        every name as used while that is refused (it answers success: false while anything runs)."""
        plane = self._plane
        answer = await plane.calls.post(replica.endpoint, "/reset_prefix_cache", plane.settings.admin_timeout_secs)
        replica.stale_cache = answer.ok and b'"success":false' in answer.body.replace(b" ", b"")
        if not replica.stale_cache:
            plane.known |= {replica.endpoint.base}

    async def _adopt(self) -> bool:
        """Once, without a journal: what all replicas hold alike is taken over. False while a replica is unseen."""
        plane, fleet = self._plane, self._plane.fleet
        if self._adopted:
            return True
        members = fleet.members()
        if any(replica.index not in self._first for replica in members):
            return False
        self._adopted = True
        if not plane.remembers and not fleet.desired.adapters:
            for name, upstream, path in adoptable([seen for seen in self._first.values() if seen is not None]):
                logger.info("adopted %s from the replicas", name)
                await plane.edit(edits.bind(Adapter(name, path, None, upstream)))
        return True

    # -- acting --------------------------------------------------------------------------------------------------------

    async def _act(self, replica: Replica, action: Action) -> bool:
        """Do one action; False when it did not work (the reason is in last_error) and the rest must wait."""
        plane, fleet, index = self._plane, self._plane.fleet, replica.index
        calls, endpoint, timeout = plane.calls, replica.endpoint, plane.settings.admin_timeout_secs
        if isinstance(action, Load):
            return await self._load(replica, action.adapter)
        if isinstance(action, Unload):
            if action.upstream in plane.pending or action.upstream in self._kept():
                return True
            answer = await calls.unload(endpoint, action.upstream, timeout)
            if answer.outcome in (Outcome.OK, Outcome.UNKNOWN_NAME):
                fleet.given_up(index, action.upstream)
                return True
        elif isinstance(action, PauseIt):
            answer = await calls.post(endpoint, _with_query("/pause", action.query), timeout)
            if answer.ok:
                fleet.set_paused(index, True)
                fleet.forget_cache(index)
                return True
        elif isinstance(action, ResumeIt):
            answer = await calls.post(endpoint, "/resume", timeout)
            if answer.ok:
                fleet.set_paused(index, False)
                return True
        elif isinstance(action, ResetCache):
            answer = await calls.post(endpoint, "/reset_prefix_cache", timeout)
            if answer.ok and b'"success":false' not in answer.body.replace(b" ", b""):
                fleet.forget_cache(index)
                fleet.set_epoch(index, action.epoch)
                return True
        elif isinstance(action, SleepIt):
            answer = await calls.post(endpoint, _with_query("/sleep", action.query), timeout)
            if answer.ok:
                fleet.set_asleep(index, True)
                return True
        elif isinstance(action, WakeIt):
            answer = await calls.post(endpoint, "/wake_up", timeout)
            if answer.ok:
                fleet.set_asleep(index, False)
                return True
        fleet.set_error(index, f"{describe(action)}: {answer.message or answer.status}")
        return False

    async def _load(self, replica: Replica, adapter: Adapter) -> bool:
        """Give a replica what it lacks, but never other weights than those committed: files that have changed since
        are not loaded under the old name."""
        plane, fleet, index = self._plane, self._plane.fleet, replica.index
        if adapter.digest is not None:
            seen = await plane.in_thread(plane.files.look, adapter.path)
            if seen is not None and seen.digest != adapter.digest:
                fleet.set_error(
                    index,
                    f"cannot load {adapter.name}: the files at its path are no longer the committed ones; "
                    f"publish again, or unload it (lorafleet unload {adapter.name})",
                )
                await self._give_up_if_lost(adapter)
                return False
        if fleet.desired.by_upstream(adapter.upstream) is None:
            return True
        answer = await plane.calls.load(
            replica.endpoint, adapter.upstream, adapter.path, plane.settings.load_deadline_secs
        )
        if answer.ok:
            fleet.held(index, adapter.upstream, adapter.path)
            self._unseen_since.pop(adapter.upstream, None)
            return True
        fleet.set_error(index, f"loading {adapter.name}: {answer.message}")
        if answer.outcome in (Outcome.NOT_VISIBLE, Outcome.REFUSED):
            await self._give_up_if_lost(adapter)
        return False

    async def _give_up_if_lost(self, adapter: Adapter) -> None:
        """An adapter that no replica holds and none can load keeps every replica from serving: after a while it is
        given up, so that yesterday's deleted run does not block today's."""
        plane, fleet = self._plane, self._plane.fleet
        if any(adapter.upstream in replica.holds for replica in fleet.members()):
            self._unseen_since.pop(adapter.upstream, None)
            return
        since = self._unseen_since.setdefault(adapter.upstream, fleet.clock())
        if fleet.clock() - since >= plane.settings.lost_files_secs and not plane.busy:
            logger.error("%s is given up: no replica holds it and its files cannot be loaded any more", adapter.name)
            if fleet.desired.adapters.get(adapter.name) == adapter:
                await plane.edit(edits.unbind(adapter.name))

    # -- retiring ------------------------------------------------------------------------------------------------------

    def _kept(self) -> set[str]:
        return {adapter.upstream for adapter in self._plane.fleet.desired.adapters.values()}

    def _draining(self) -> set[str]:
        """Retiring names under which completions still run, until the drain deadline."""
        fleet, now = self._plane.fleet, self._plane.fleet.clock()
        draining = set()
        for adapter in fleet.desired.retiring:
            until = self._drain_until.setdefault(adapter.upstream, now + self._plane.settings.unload_drain_secs)
            if fleet.running.get(adapter.upstream) and now < until:
                draining.add(adapter.upstream)
        return draining

    async def _finish_retiring(self) -> None:
        """Forget retiring names that no living replica holds any more."""
        plane, fleet = self._plane, self._plane.fleet
        for adapter in fleet.desired.retiring:
            held = any(
                adapter.upstream in r.holds for r in fleet.members() if r.state not in (State.DOWN, State.DRAINING)
            )
            if not held and adapter.upstream not in plane.pending:
                self._drain_until.pop(adapter.upstream, None)
                await plane.edit(edits.retired(adapter.upstream))


def describe(action: Action) -> str:
    """An action in words for last_error."""
    match action:
        case Load(adapter):
            return f"lacks {adapter.name}"
        case Unload(upstream):
            return f"still lists {upstream}"
        case PauseIt():
            return "is not paused"
        case ResumeIt():
            return "is paused"
        case ResetCache():
            return "missed a cache reset"
        case SleepIt():
            return "is awake"
        case WakeIt():
            return "is asleep"


def _with_query(path: str, query: str) -> str:
    return f"{path}?{query}" if query else path
