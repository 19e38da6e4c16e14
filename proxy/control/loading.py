"""One replica is asked to load one adapter, until it has it, says no, dies, or the deadline passes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.control.answers import Answer, Observed, Outcome, ReplicaCalls
from proxy.control.plan import same_path
from proxy.control.transaction import Said
from proxy.errors import Conflict, ReplicaAnswer

if TYPE_CHECKING:
    from proxy.upstream.transport import Endpoint

logger = logging.getLogger("lorafleet.control")

FIRST_RETRY_SECS = 0.05
LAST_RETRY_SECS = 0.4
"""A mount that lags is asked again after 50 ms, then ever later, at most 0.4 s (and 20 % of jitter): the load ends
within 0.6 s of the moment that the files can be seen."""

SAY_AFTER_SECS = 2.0
"""A load that waits longer than this for files says so in the log."""

TRUTH_SECS = 5.0
"""How long the truth is sought from a replica whose answer was lost, before it is taken for dead."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`conflict`: the replica listed the name before it was asked, so nobody knows with which weights. `unsure`: an
    answer was lost, so that what was asked for may have happened, or may happen yet."""

    said: Said
    answer: ReplicaAnswer
    conflict: bool = False
    unsure: bool = False


@dataclass(slots=True)
class Loading:
    """The load of `path` as `upstream` on one replica.

    `turn` is entered for each attempt, and only for that: what waits for files holds nobody up. It may raise Conflict:
    there is no room any more. `holds` gives the names that the replica is believed to list and that nobody takes off
    it; when some are gone after a lost answer, the engine died of the load, however quickly it came back. `ours`: if it
    lists `upstream` already, then because we loaded these weights earlier. `asking` is true while an answer is due.
    """

    calls: ReplicaCalls
    replica: int
    endpoint: Endpoint
    upstream: str
    path: str
    holds: Callable[[], Collection[str]]
    turn: Callable[[], AbstractAsyncContextManager[None]]
    deadline: float
    deadline_secs: float
    abandoned: Callable[[], bool]
    ours: bool = False
    asking: bool = False

    async def run(self) -> Verdict:
        """Never raises for what the replica does."""
        verdict, lost = await self._run()
        return replace(verdict, unsure=True) if lost and verdict.said is not Said.OK else verdict

    async def _run(self) -> tuple[Verdict, int]:
        clock = asyncio.get_running_loop().time
        began, said = clock(), False
        delay, lost = FIRST_RETRY_SECS, 0
        while True:
            try:
                async with self.turn():
                    if self.abandoned():
                        return self._given_up(None), lost
                    answer, verdict = await self._attempt(lost)
            except Conflict as error:
                return Verdict(Said.REFUSED, ReplicaAnswer(self.replica, None, f"not asked: {error.message}")), lost
            lost += answer.outcome is Outcome.NO_ANSWER
            if verdict is not None:
                return verdict, lost
            if not said and clock() - began > SAY_AFTER_SECS:
                said = True
                logger.warning("waiting for replica %d to see %s: %s", self.replica, self.path, answer.message)
            if self.abandoned():
                return self._given_up(answer.status), lost
            if clock() + delay >= self.deadline:
                last = f"not loadable within {self.deadline_secs:g} s; last word: {answer.message}"
                return self._said(Said.REFUSED, answer, last), lost
            await asyncio.sleep(delay * random.uniform(0.8, 1.2))
            delay = min(delay * 1.6, LAST_RETRY_SECS)

    async def _attempt(self, lost: int) -> tuple[Answer, Verdict | None]:
        """Ask once; no verdict: it does not have the adapter, and may be asked again."""
        held = frozenset(self.holds())
        left = self.deadline - asyncio.get_running_loop().time()
        self.asking = True
        try:
            answer = await self.calls.load(self.endpoint, self.upstream, self.path, max(left, 0.1))
            if answer.outcome is Outcome.NO_ANSWER:
                return answer, await self._truth(answer, lost + 1, held)
            return answer, await self._judge(answer, lost)
        finally:
            self.asking = False

    async def _judge(self, answer: Answer, lost: int) -> Verdict | None:
        match answer.outcome:
            case Outcome.OK:
                return self._said(Said.OK, answer, answer.message)
            case Outcome.NOT_VISIBLE:
                return None
            case Outcome.UNREACHABLE:
                return self._said(Said.GONE, answer, answer.message)
            case Outcome.EXISTS if self.ours:
                return self._said(Said.OK, answer, "holds it already")
            case Outcome.EXISTS:
                seen = await self.calls.observe(self.endpoint, TRUTH_SECS) if lost else None
                if isinstance(seen, Observed) and self._listed(seen):
                    return self._said(Said.OK, answer, "loaded, the first answer was lost")
                return Verdict(Said.REFUSED, answer.of(self.replica), conflict=True)
        return self._said(Said.REFUSED, answer, answer.message)

    async def _truth(self, answer: Answer, lost: int, held: Collection[str]) -> Verdict | None:
        """What really happened when no answer came. None: it did not happen and may be tried again."""
        clock = asyncio.get_running_loop().time
        until = clock() + TRUTH_SECS
        while clock() < until:
            seen = await self.calls.observe(self.endpoint, TRUTH_SECS)
            if isinstance(seen, Observed):
                if self._listed(seen):
                    return self._said(Said.OK, answer, "loaded, the answer was lost")
                if lost > 1 or not seen.adapters.keys() >= set(held):
                    return self._said(Said.DIED, answer, "restarted while it loaded")
                return None
            await asyncio.sleep(0.1)
        return self._said(Said.DIED, answer, f"died or hung while it loaded ({answer.message})")

    def _listed(self, seen: Observed) -> bool:
        return self.upstream in seen.adapters and same_path(seen.adapters[self.upstream], self.path)

    def _given_up(self, status: int | None) -> Verdict:
        why = "given up because another replica refused"
        return Verdict(Said.REFUSED, ReplicaAnswer(self.replica, status, why, at_fault=False))

    def _said(self, said: Said, answer: Answer, message: str) -> Verdict:
        return Verdict(said, ReplicaAnswer(self.replica, answer.status, message))
