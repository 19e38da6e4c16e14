"""Receipts of finished completions: noted on the data path, written by a thread of their own.

A request costs its event loop one append to a queue. The thread looks at the queue a few times a second, turns entries
into lines and lets go of the interpreter after every half millisecond of that, so that no request waits for it longer;
nothing is fsynced. A full disk is waited for while there is room in the queue; after that receipts are lost, and
counted. Nothing that goes wrong here fails a completion.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from proxy.receipt_file import ReceiptFile
from proxy.receipt_line import Lines
from proxy.routing.request import ROUTED_PATHS
from proxy.web.observe import Outcome, Silent

logger = logging.getLogger("lorafleet")

QUEUE = 16384
"""Receipts that may wait for the thread."""

QUEUE_BYTES = 64 << 20
"""Bytes of hashes and token ids that may wait with them."""

LOOK_SECS = 0.2
RETRY_SECS = 2.0
"""Between two looks at a file that cannot be written."""

WORK_SECS = 0.0005
REST_SECS = 0.002
"""Shorter turns cost more: with a rest after every 16 lines a request took 15 us more of the processor than with one
after every 64."""

WRITE_BYTES = 256 << 10
CLOSE_SECS = 1.0
"""How long the end of the process waits for the last lines."""

Entry = tuple[float, int, Outcome]
"""When the request had been read (Unix seconds), the bytes that the entry keeps alive, what came of it."""


@dataclass(slots=True)
class ReceiptCounts:
    """Receipts written, lost because the queue was full, and lost because they could not be written at the end."""

    written: int = 0
    overflow: int = 0
    failed: int = 0


class Receipts(Silent):
    """An observer that writes down every completion that is over. `start` once, `close` at the end."""

    def __init__(self, file: ReceiptFile, counts: ReceiptCounts, *, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix seconds."""
        self._file = file
        self._counts = counts
        self._clock = clock
        self._queue: deque[Entry] = deque()
        self._bytes_in = 0  # the event loop's
        self._bytes_out = 0  # the thread's
        self._lines = Lines()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._broken = False

    def finished(self, outcome: Outcome) -> None:
        if outcome.path not in ROUTED_PATHS:
            return
        size = _size(outcome)
        if len(self._queue) >= QUEUE or self._bytes_in - self._bytes_out + size > QUEUE_BYTES:
            self._counts.overflow += 1
            return
        self._bytes_in += size
        self._queue.append((self._clock() - outcome.total_secs, size, outcome))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="receipts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left and close the file; waits no longer than CLOSE_SECS for a disk that hangs."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECS)
            if self._thread.is_alive():
                logger.error("receipts: the disk does not answer; %d receipts are lost", len(self._queue))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(RETRY_SECS if self._broken else LOOK_SECS):
            self.drain()
        self.drain()
        self._counts.failed += len(self._queue)
        self._file.close()

    def drain(self) -> None:
        """Write all that waits; what cannot be written goes on waiting."""
        while self._queue:
            batch: list[Entry] = []
            try:
                if self._file.prepare():
                    self._lines.forget()
                lines = self._take(batch)
                self._file.write(b"".join(lines))
            except OSError as error:
                self._queue.extendleft(reversed(batch))
                self._lines.forget()
                if not self._broken:
                    self._broken = True
                    logger.error("receipts: cannot be written, and wait in memory: %s", error.strerror or error)
                return
            self._bytes_out += sum(size for _, size, _ in batch)
            self._counts.written += len(lines)
            if self._broken:
                self._broken = False
                logger.warning("receipts: can be written again")

    def _take(self, batch: list[Entry]) -> list[bytes]:
        """Lines for one write. The entries that they were made from are put into `batch`."""
        lines: list[bytes] = []
        size = 0
        rest_at = time.perf_counter() + WORK_SECS
        while self._queue and size < WRITE_BYTES:
            entry = self._queue.popleft()
            batch.append(entry)
            try:
                lines.append(self._lines.line(entry[0], entry[2]))
            except Exception:
                logger.exception("receipts: one could not be put into words")
                self._counts.failed += 1
                continue
            size += len(lines[-1])
            if time.perf_counter() > rest_at and not self._stop.is_set():
                time.sleep(REST_SECS)
                rest_at = time.perf_counter() + WORK_SECS
        return lines


def _size(outcome: Outcome) -> int:
    """Memory that an entry keeps alive, about: a hash is a Python int in a list."""
    usage, decision = outcome.usage, outcome.decision
    size = len(usage.output_ids) if usage is not None and usage.output_ids is not None else 0
    if decision is not None:
        for chain in decision.chains:
            size += 40 * len(chain.blocks)
    return size
