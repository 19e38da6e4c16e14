"""The control plane's spine: one edit at a time to the desired state, one change at a time to the fleet.

The changes themselves are in `adapters.py` and `switches.py`; `reconcile.py` makes every replica equal to what they
decided.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from proxy.control import adapter_files
from proxy.control import journal as edits
from proxy.control.answers import Answer, Observed, Outcome, ReplicaCalls
from proxy.control.failpoints import reach
from proxy.control.freshening import Freshening
from proxy.control.journal import Line, Recovered
from proxy.control.loading import TRUTH_SECS, Verdict
from proxy.control.records import TransactionRecord
from proxy.control.runner import Call, run
from proxy.control.settings import ControlSettings
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.errors import LorafleetError, TransactionFailed, Unavailable
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.control.adapter_files import Fingerprint, Seen
    from proxy.control.desired import Desired
    from proxy.fleet import Fleet, Replica

logger = logging.getLogger("lorafleet.control")

T = TypeVar("T")
Threaded = Callable[..., Awaitable[Any]]

READY_WAIT_SECS = 5.0


class JournalLike(Protocol):
    def open(self) -> Recovered: ...

    def append(self, line: Line, desired: Desired) -> None: ...

    def close(self) -> None: ...


class FilesLike(Protocol):
    """What the proxy sees of adapters on disk; `proxy.control.adapter_files` unless a test brings its own."""

    def look(self, path: str) -> Seen | None: ...

    def fingerprint(self, path: str) -> Fingerprint | None: ...


class Stopwatch:
    """Names the phases of a transaction as they go by, for its record."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.began = self._mark = now()
        self.phases: list[tuple[str, float]] = []

    def lap(self, name: str) -> None:
        now = self._now()
        self.phases.append((name, now - self._mark))
        self._mark = now


class Plane:
    """What every change shares: the fleet, the calls, the journal, and the queue that lets one change run at a time."""

    def __init__(
        self,
        fleet: Fleet,
        calls: ReplicaCalls,
        journal: JournalLike,
        settings: ControlSettings,
        *,
        wall: Callable[[], float] = time.time,
        in_thread: Threaded = asyncio.to_thread,
        files: FilesLike = adapter_files,
        on_record: Callable[[TransactionRecord], None] = lambda record: None,
    ) -> None:
        self.fleet = fleet
        self.calls = calls
        self.journal = journal
        self.settings = settings
        self.wall = wall
        self.in_thread = in_thread
        self.files = files
        self.remembers = False
        self.pending: set[str] = set()
        self.leaving: Counter[str] = Counter()
        self.changes = 0
        self.freshening = Freshening(self)
        self.records: deque[TransactionRecord] = deque(maxlen=50)
        self._on_record = on_record
        self._ids = itertools.count(1)
        self._turn = asyncio.Lock()
        self._edit_turn = asyncio.Lock()
        self._last: dict[str, tuple[Hashable, asyncio.Task[Any]]] = {}
        self._background: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        """Read the journal. Raises ConfigError."""
        recovered = self.journal.open()
        self.remembers = recovered.found
        self.fleet.commit(recovered.desired)
        for replica in self.fleet.members():
            replica.stale_cache = replica.endpoint.base not in recovered.desired.met

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._turn.locked()

    async def edit(self, line: Line) -> None:
        """Change the desired state by one line: on disk first, then in force, in one step. Raises TransactionFailed."""
        async with self._edit_turn:
            desired = edits.apply(self.fleet.desired, line)
            reach(f"before-{line['do']}")
            try:
                await self.in_thread(self.journal.append, line, desired)
            except OSError as error:
                reason = error.strerror or str(error)
                raise TransactionFailed(
                    f"the journal in --state-dir cannot be written: {reason}", status=507
                ) from error
            reach(f"after-{line['do']}")
            self.fleet.commit(desired)

    async def one_at_a_time(
        self, kind: str, name: str | None, key: Hashable, change: Callable[[Stopwatch], Awaitable[T]]
    ) -> T:
        """Run `change` when every change before it is over.

        It runs in a task of its own: a client that leaves does not break it in two. A request that equals the last one
        in the queue for the same subject (`name`, or the fleet) attaches to it and gets its result.
        """
        subject = name or ""
        last = self._last.get(subject)
        if last is not None and last[0] == key and not last[1].done():
            task: asyncio.Task[T] = last[1]
        else:
            task = asyncio.get_running_loop().create_task(self._take_turn(kind, name, change))
            self._last[subject] = (key, task)
            self.keep(task)
            task.add_done_callback(lambda done: self._forget(subject, done))
        return await asyncio.shield(task)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task that nobody waits for, and see its exception."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def cancel(self) -> None:
        """Cancel what is under way; the journal says how to go on."""
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def stop(self) -> None:
        await self.cancel()
        self.journal.close()

    def _forget(self, subject: str, done: asyncio.Task[Any]) -> None:
        last = self._last.get(subject)
        if last is not None and last[1] is done:
            del self._last[subject]

    async def _take_turn(self, kind: str, name: str | None, change: Callable[[Stopwatch], Awaitable[T]]) -> T:
        clock = self.fleet.clock
        watch = Stopwatch(clock)
        number, started = next(self._ids), self.wall()

        def record(outcome: str, error: str | None = None) -> None:
            entry = TransactionRecord(
                number, kind, name, outcome, started, clock() - watch.began, tuple(watch.phases), error
            )
            if self.records and self.records[0].id == number:
                self.records[0] = entry
            else:
                self.records.appendleft(entry)
            if outcome != "running":
                self._on_record(entry)

        async with self._turn:
            self.changes += 1
            watch.lap("queue")
            record("running")
            try:
                result = await change(watch)
            except TransactionFailed as error:
                record("undone" if error.undone else "failed", error.message)
                logger.warning("%s %s: %s", kind, name or "", error.message)
                raise
            except LorafleetError as error:
                record("failed", error.message)
                raise
            except BaseException as error:
                record("failed", f"{type(error).__name__}")
                raise
            record("committed")
            logger.info("%s %s: done in %.3f s", kind, name or "", clock() - watch.began)
            return result

    # -- talking to replicas -------------------------------------------------------------------------------------------

    async def participants(self) -> list[Replica]:
        """The replicas that a change must reach: those that may serve.

        Waits a few seconds for one to be ready (both may be restarting), then raises Unavailable.
        """
        for _ in range(int(READY_WAIT_SECS / 0.1)):
            if self.fleet.ready():
                break
            await asyncio.sleep(0.1)
        ready = self.fleet.ready()
        members = [replica for replica in self.fleet.members() if replica.state is not State.DRAINING]
        if not ready:
            raise Unavailable("no replica is ready, so nothing was changed", retry_after_secs=1)
        if self.settings.strict and len(ready) < len(members):
            absent = [f"replica {r.index} is {r.state.value}" for r in members if r not in ready]
            raise TransactionFailed(f"--strict: {', '.join(absent)}; nothing was changed", status=503)
        return ready

    async def broadcast(
        self, replicas: list[Replica], *, ask: Call, undo: Call | None, canary: bool = False
    ) -> tuple[Transaction, dict[int, Verdict]]:
        """Ask them all, or undo it on all. A replica that could not be put back stops being routable."""
        transaction = Transaction(
            tuple(replica.index for replica in replicas),
            canary=canary,
            undoable=undo is not None,
            strict=self.settings.strict,
        )
        fleet = self.fleet

        def gone(index: int) -> bool:
            return fleet.replicas[index].state is State.DOWN or fleet.replicas[index].removed

        verdicts, tainted = await run(transaction, ask=ask, undo=undo or ask, gone=gone)
        for index in tainted:
            fleet.apply(index, Event.DRIFTED, "could not be put back after a failed change")
        for index in transaction.where(Seat.LEFT):
            reason = verdicts[index].answer.message
            fleet.call_failed(index, reason)
            if transaction.phase is Phase.COMMITTED:
                fleet.apply(index, Event.DRIFTED, f"missed a change: {reason}")
        return transaction, verdicts

    async def take_off(self, index: int, upstream: str) -> Verdict:
        """Unload on one replica; a lost answer is asked again: unloading what is not there does no harm."""
        endpoint = self.fleet.replicas[index].endpoint
        answer = Answer(Outcome.NO_ANSWER, None, "not asked")
        self.leaving[upstream] += 1
        try:
            for _ in range(3):
                reach("before-take-off")
                answer = await self.calls.unload(endpoint, upstream, self.settings.admin_timeout_secs)
                reach("after-take-off")
                if answer.outcome in (Outcome.OK, Outcome.UNKNOWN_NAME):
                    self.fleet.given_up(index, upstream)
                    return Verdict(Said.OK, answer.of(index))
                if answer.outcome is Outcome.REFUSED:
                    return Verdict(Said.REFUSED, answer.of(index))
                if answer.outcome is Outcome.UNREACHABLE:
                    return Verdict(Said.GONE, answer.of(index))
                await asyncio.sleep(0.1)
            return Verdict(Said.DIED, answer.of(index), unsure=True)
        finally:
            self.leaving[upstream] -= 1
            if not self.leaving[upstream]:
                del self.leaving[upstream]

    async def switch(self, replica: int, target: str, truth: Callable[[Observed], bool | None]) -> Verdict:
        """POST `target` to one replica; when the answer is lost, `truth` of what the replica shows decides."""
        endpoint = self.fleet.replicas[replica].endpoint
        for attempt in (1, 2):
            reach("before-switch")
            answer = await self.calls.post(endpoint, target, self.settings.admin_timeout_secs)
            reach("after-switch")
            if answer.ok:
                return Verdict(Said.OK, answer.of(replica))
            if answer.outcome is Outcome.UNREACHABLE:
                return Verdict(Said.GONE, answer.of(replica))
            if answer.outcome is not Outcome.NO_ANSWER:
                return Verdict(Said.REFUSED, answer.of(replica))
            seen = await self.look(replica)
            if isinstance(seen, Answer):
                return Verdict(Said.DIED, answer.of(replica))
            if truth(seen):
                return Verdict(Said.OK, answer.of(replica))
            if attempt == 2:
                break
        return Verdict(Said.REFUSED, answer.of(replica))

    async def look(self, replica: int) -> Observed | Answer:
        """What the replica shows, asked until it answers or is taken for dead."""
        endpoint = self.fleet.replicas[replica].endpoint
        clock = asyncio.get_running_loop().time
        until = clock() + TRUTH_SECS
        while True:
            seen = await self.calls.observe(endpoint, TRUTH_SECS, sleep=True)
            if isinstance(seen, Observed) or clock() > until:
                return seen
            await asyncio.sleep(0.1)


def failure(what: str, transaction: Transaction, verdicts: dict[int, Verdict]) -> TransactionFailed:
    """The error of a transaction that did not happen: what each replica said, and a status that fits all of them."""
    answers = [verdict.answer for verdict in verdicts.values() if verdict.said is not Said.OK]
    statuses = {a.status for a in answers if a.status is not None}
    refused = [v for v in verdicts.values() if v.said is Said.REFUSED]
    status = 502
    if refused and len(statuses) == 1 and 400 <= (only := statuses.pop()) < 500 and only != 404:
        status = only
    tainted = list(transaction.where(Seat.TAINTED))
    ending = "undone on every replica" if not tainted else f"not undone on replica {', '.join(map(str, tainted))}"
    return TransactionFailed(f"{what} failed and was {ending}", answers, status=status, undone=not tainted)
