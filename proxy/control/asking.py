"""Talking to replicas on behalf of a change: who takes part, what all of them said, what is true of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from proxy.control.answers import Answer, Observed, Outcome
from proxy.control.failpoints import reach
from proxy.control.loading import TRUTH_SECS, Verdict
from proxy.control.result import Result
from proxy.control.runner import Call, run
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.errors import ReplicaAnswer, TransactionFailed, Unavailable
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.control.plane import Plane
    from proxy.fleet import Replica

READY_WAIT_SECS = 5.0
RELEASE_TRIES = 2


async def participants(plane: Plane) -> list[Replica]:
    """The replicas that a change must reach: those that may serve.

    Waits a few seconds for one to be ready (both may be restarting), then raises Unavailable.
    """
    fleet = plane.fleet
    for _ in range(int(READY_WAIT_SECS / 0.1)):
        if fleet.ready():
            break
        await asyncio.sleep(0.1)
    ready = fleet.ready()
    if not ready:
        raise Unavailable("no replica is ready, so nothing was changed", retry_after_secs=1)
    members = [replica for replica in fleet.members() if replica.state is not State.DRAINING]
    absent = [replica for replica in members if replica not in ready]
    if plane.settings.strict and absent:
        who = ", ".join(f"replica {r.index} is {r.state.value}" for r in absent)
        answers = [ReplicaAnswer(r.index, None, f"not asked: {r.state.value}", at_fault=False) for r in members]
        raise TransactionFailed(f"--strict: {who}; nothing was changed", answers, status=503)
    return ready


async def broadcast(
    plane: Plane,
    replicas: list[Replica],
    *,
    ask: Call,
    undo: Call | None,
    canary: bool = False,
    died: Callable[[int], Said] = lambda index: Said.DIED,
) -> Result:
    """Ask them all, or undo it on all. A replica that could not be put back stops being routable.

    `died` is what a replica that is declared dead while it has not answered counts as having said.
    """
    fleet, strict = plane.fleet, plane.settings.strict
    seats = tuple(replica.index for replica in replicas)
    transaction = Transaction(seats, canary=canary, undoable=undo is not None, strict=strict)

    def gone(index: int) -> Said | None:
        replica = fleet.replicas[index]
        return died(index) if replica.state is State.DOWN or replica.removed else None

    verdicts, spoilt = await run(transaction, ask=ask, undo=undo or ask, gone=gone)
    for index in spoilt:
        _behind(plane, index, "could not be put back after a failed change")
    for index in transaction.where(Seat.LEFT):
        reason = verdicts[index].answer.message
        fleet.call_failed(index, reason)
        if transaction.phase is Phase.COMMITTED:
            _behind(plane, index, f"missed a change: {reason}")
    return Result(transaction, verdicts, spoilt)


async def take_off(plane: Plane, index: int, upstream: str, tries: int = 3) -> Verdict:
    """Unload on one replica; after a lost answer it is asked again: unloading what is not there does no harm."""
    fleet = plane.fleet
    answer = Answer(Outcome.NO_ANSWER, None, "not asked")
    plane.leaving[upstream] += 1
    try:
        for _ in range(tries):
            reach("before-take-off")
            answer = await plane.calls.unload(
                fleet.replicas[index].endpoint, upstream, plane.settings.admin_timeout_secs
            )
            reach("after-take-off")
            if answer.outcome in (Outcome.OK, Outcome.UNKNOWN_NAME):
                fleet.given_up(index, upstream)
                return Verdict(Said.OK, answer.of(index))
            if answer.outcome is Outcome.REFUSED:
                return Verdict(Said.REFUSED, answer.of(index))
            if answer.outcome is Outcome.UNREACHABLE:
                return Verdict(Said.GONE, answer.of(index))
            await asyncio.sleep(0.1)
        return Verdict(Said.DIED, answer.of(index), unsure=True)
    finally:
        plane.leaving[upstream] -= 1
        if not plane.leaving[upstream]:
            del plane.leaving[upstream]


async def switch(plane: Plane, replica: int, target: str, truth: Callable[[Observed], bool | None]) -> Verdict:
    """POST `target` to one replica; when the answer is lost, `truth` of what the replica shows decides."""
    endpoint = plane.fleet.replicas[replica].endpoint
    for attempt in (1, 2):
        reach("before-switch")
        answer = await plane.calls.post(endpoint, target, plane.settings.admin_timeout_secs)
        reach("after-switch")
        if answer.ok:
            return Verdict(Said.OK, answer.of(replica))
        if answer.outcome is Outcome.UNREACHABLE:
            return Verdict(Said.GONE, answer.of(replica))
        if answer.outcome is not Outcome.NO_ANSWER:
            return Verdict(Said.REFUSED, answer.of(replica))
        seen = await look(plane, replica)
        if isinstance(seen, Answer):
            return Verdict(Said.DIED, answer.of(replica))
        if truth(seen):
            return Verdict(Said.OK, answer.of(replica))
        if attempt == 2:
            break
    return Verdict(Said.REFUSED, answer.of(replica))


async def look(plane: Plane, replica: int) -> Observed | Answer:
    """What the replica shows, asked until it answers or is taken for dead."""
    endpoint = plane.fleet.replicas[replica].endpoint
    clock = asyncio.get_running_loop().time
    until = clock() + TRUTH_SECS
    while True:
        seen = await plane.calls.observe(endpoint, TRUTH_SECS, sleep=True)
        if isinstance(seen, Observed) or clock() > until:
            return seen
        await asyncio.sleep(0.1)


async def release(plane: Plane, what: str, replicas: list[Replica], ask: Call) -> None:
    """Resume or wake. Freezing the fleet again because one replica will not come back would end the run, so that
    replica is left out (not routable until the reconciler has put it right) and the others go on.

    Raises TransactionFailed when nobody did it.
    """
    refused: dict[int, Verdict] = {}

    async def insist(index: int) -> Verdict:
        for _ in range(RELEASE_TRIES - 1):
            verdict = await ask(index)
            if verdict.said is not Said.REFUSED:
                return verdict
        verdict = await ask(index)
        if verdict.said is Said.REFUSED:
            refused[index] = verdict
            return Verdict(Said.GONE, verdict.answer)
        return verdict

    result = await broadcast(plane, replicas, ask=insist, undo=None)
    if not result.committed:
        raise Result(result.transaction, {**result.verdicts, **refused}, result.spoilt).failure(what)


async def put_back(plane: Plane, replicas: Iterable[int], undo: Call) -> None:
    """Undo what was done on these; who cannot stops being routable until the reconciler has put it right."""
    indices = list(replicas)
    for index, verdict in zip(indices, await asyncio.gather(*map(undo, indices)), strict=True):
        if verdict.said is not Said.OK:
            _behind(plane, index, "could not be put back after a failed change")


def _behind(plane: Plane, index: int, reason: str) -> None:
    """Not one that is down: that it is behind will be seen when it is back."""
    if plane.fleet.replicas[index].state is not State.DOWN:
        plane.fleet.apply(index, Event.DRIFTED, reason)
