"""The control plane's spine: what every change shares, and the one way to edit the desired state.

The changes themselves are in `loads.py`, `unloads.py`, `pausing.py` and `switches.py`; `queue.py` says whose turn it
is, `asking.py` talks to replicas, `reconcile.py` makes every replica equal to what they decided.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from proxy.control import adapter_files, edits
from proxy.control.answers import ReplicaCalls
from proxy.control.edits import Line
from proxy.control.failpoints import reach
from proxy.control.freshening import Freshening
from proxy.control.journal import Recovered
from proxy.control.queue import Queue
from proxy.control.records import TransactionRecord
from proxy.control.settings import ControlSettings
from proxy.control.threads import Threads
from proxy.errors import TransactionFailed

if TYPE_CHECKING:
    from proxy.control.adapter_files import Fingerprint, Seen
    from proxy.control.desired import Desired
    from proxy.fleet import Fleet

Threaded = Callable[..., Awaitable[Any]]

FILE_THREADS = 32


class JournalLike(Protocol):
    def open(self) -> Recovered: ...

    def append(self, line: Line, desired: Desired) -> None: ...

    def close(self) -> None: ...


class FilesLike(Protocol):
    """What the proxy sees of adapters on disk; `proxy.control.adapter_files` unless a test brings its own."""

    def look(self, path: str) -> Seen | None: ...

    def fingerprint(self, path: str) -> Fingerprint | None: ...


class Plane:
    """`pending` are the upstream names that loads under way work on, `leaving` those that are being taken off some
    replica. `remembers`: there was a journal. `in_thread` runs what touches an adapter's
    files, `hanging` are the calls that do not come back, by path (see `sight`)."""

    def __init__(
        self,
        fleet: Fleet,
        calls: ReplicaCalls,
        journal: JournalLike,
        settings: ControlSettings,
        *,
        wall: Callable[[], float] = time.time,
        in_thread: Threaded | None = None,
        files: FilesLike = adapter_files,
        on_record: Callable[[TransactionRecord], None] = lambda record: None,
    ) -> None:
        self.fleet = fleet
        self.calls = calls
        self.journal = journal
        self.settings = settings
        self.wall = wall
        self.in_thread = in_thread or Threads(FILE_THREADS, "files")
        self._write = in_thread or Threads(1, "journal")
        self.files = files
        self.hanging: dict[str, asyncio.Future[Any]] = {}
        self.remembers = False
        self.pending: set[str] = set()
        self.leaving: Counter[str] = Counter()
        self.freshening = Freshening(self)
        self.queue = Queue(fleet.clock, wall, on_record)
        self._edit_turn = asyncio.Lock()

    def open(self) -> None:
        """Read the journal. Raises ConfigError."""
        recovered = self.journal.open()
        self.remembers = recovered.found
        self.fleet.commit(recovered.desired)
        for replica in self.fleet.members():
            replica.stale_cache = replica.endpoint.base not in recovered.desired.met

    @property
    def busy(self) -> bool:
        """Whether a change has its turn."""
        return self.queue.busy

    @property
    def records(self) -> deque[TransactionRecord]:
        """The latest changes, the newest first."""
        return self.queue.records

    async def edit(self, line: Line) -> None:
        """Change the desired state by one line: on disk first, then in force, in one step. Raises TransactionFailed."""
        async with self._edit_turn:
            desired = edits.apply(self.fleet.desired, line)
            reach(f"before-{line['do']}")
            try:
                await self._write(self.journal.append, line, desired)
            except OSError as error:
                reason = error.strerror or str(error)
                raise TransactionFailed(
                    f"the journal in --state-dir cannot be written: {reason}", status=507
                ) from error
            reach(f"after-{line['do']}")
            self.fleet.commit(desired)

    async def cancel(self) -> None:
        """Cancel what is under way; the journal says how to go on."""
        await self.queue.cancel()

    async def stop(self) -> None:
        await self.cancel()
        self.journal.close()
