"""One action of a plan, done on one replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.control.answers import Answer, Outcome
from proxy.control.asking import take_off
from proxy.control.desired import Adapter
from proxy.control.plan import Action, Load, PauseIt, Replace, ResetCache, ResumeIt, SleepIt, Unload, WakeIt
from proxy.control.plane import Plane
from proxy.control.restoring import restore
from proxy.control.retirement import Retirement
from proxy.control.room import check_pushed_out
from proxy.control.transaction import Said
from proxy.errors import Conflict

if TYPE_CHECKING:
    from proxy.fleet import Replica


class Actor:
    def __init__(self, plane: Plane, retirement: Retirement) -> None:
        self._plane = plane
        self._retirement = retirement

    async def act(self, replica: Replica, action: Action) -> bool:
        """Do it; False when it did not work (the reason is in last_error) and what follows must wait."""
        match action:
            case Unload(upstream):
                return await self._unload(replica, upstream)
            case Load(adapter):
                return await self._load(replica, adapter)
            case Replace(adapter):
                return await self._take_off(replica, adapter.upstream) and await self._load(replica, adapter)
        answer, worked = await self._switch(replica, action)
        if not worked:
            self._plane.fleet.set_error(replica.index, f"{describe(action)}: {answer.message or answer.status}")
        return worked

    async def _unload(self, replica: Replica, upstream: str) -> bool:
        """Not when a change that came since works on the name or has committed it."""
        kept = {adapter.upstream for adapter in self._plane.fleet.desired.adapters.values()}
        if upstream in self._plane.pending or upstream in kept:
            return True
        gone = await self._take_off(replica, upstream)
        if gone:
            self._plane.freshening.soon([replica])
        return gone

    async def _take_off(self, replica: Replica, upstream: str) -> bool:
        # Once: the loop comes again, and must look at a replica that does not answer.
        verdict = await take_off(self._plane, replica.index, upstream, tries=1)
        if verdict.said is not Said.OK:
            self._plane.fleet.set_error(replica.index, f"still lists {upstream}: {verdict.answer.message}")
        return verdict.said is Said.OK

    async def _load(self, replica: Replica, adapter: Adapter) -> bool:
        plane, fleet = self._plane, self._plane.fleet
        if fleet.desired.by_upstream(adapter.upstream) is None:  # taken away since the plan was made
            return True
        await plane.freshening.freshen([replica], loading=adapter.upstream)
        try:
            await check_pushed_out(plane, replica, adapter)
        except Conflict as error:
            fleet.set_error(replica.index, error.message)
            return False
        answer = await restore(plane, replica.index, adapter, plane.settings.load_deadline_secs)
        if answer.ok:
            self._retirement.found(adapter)
            return True
        fleet.set_error(replica.index, f"loading {adapter.name}: {answer.message}")
        if answer.outcome in (Outcome.NOT_VISIBLE, Outcome.REFUSED):
            await self._retirement.could_not_load(adapter)
        return False

    async def _switch(self, replica: Replica, action: Action) -> tuple[Answer, bool]:
        fleet, index = self._plane.fleet, replica.index
        answer = await self._plane.calls.post(
            replica.endpoint, target_of(action), self._plane.settings.admin_timeout_secs
        )
        if not answer.ok:
            return answer, False
        match action:
            case PauseIt():
                fleet.set_paused(index, True)
                fleet.forget_cache(index)
            case ResumeIt():
                fleet.set_paused(index, False)
            case SleepIt():
                fleet.set_asleep(index, True)
                fleet.forget_cache(index)
            case WakeIt():
                fleet.set_asleep(index, False)
                fleet.set_paused(index, False)
            case ResetCache(epoch):
                if not emptied(answer):
                    return answer, False
                fleet.forget_cache(index)
                fleet.set_epoch(index, epoch)
        return answer, True


def emptied(answer: Answer) -> bool:
    """Whether a /reset_prefix_cache did something: while anything runs vLLM answers 200 and `{"success": false}`."""
    return answer.ok and b'"success":false' not in answer.body.replace(b" ", b"")


def target_of(action: Action) -> str:
    """What is POSTed for an action that switches something."""
    match action:
        case PauseIt(query):
            return f"/pause?{query}" if query else "/pause"
        case SleepIt(query):
            return f"/sleep?{query}" if query else "/sleep"
        case ResumeIt():
            return "/resume"
        case WakeIt():
            return "/wake_up"
        case ResetCache():
            return "/reset_prefix_cache"
    raise ValueError(f"{action} switches nothing")


def describe(action: Action) -> str:
    """An action in words for last_error."""
    match action:
        case Load(adapter):
            return f"lacks {adapter.name}"
        case Replace(adapter):
            return f"may list other weights as {adapter.name}"
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
