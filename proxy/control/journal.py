"""What must outlive a crash of the proxy: the desired state, one line an edit, in an append-only file.

A line is on disk (fsync) before the edit takes effect anywhere else, so after kill -9 the file is never behind what a
client was told. A line that was cut by the crash is the last one and is dropped. `reserve` lines come before the first
replica is offered a name: a name whose commit is missing was being loaded when the proxy died, and the reconciler takes
it off the replicas (it is in `used` and not wanted).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from proxy.control.desired import Desired
from proxy.control.discovery import DNS
from proxy.control.edits import Line, apply, snapshot
from proxy.control.failpoints import armed, reach
from proxy.errors import ConfigError

logger = logging.getLogger("lorafleet.control")

COMPACT_AT = 2000
"""Lines after which the file is rewritten as one snapshot."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The desired state as it was. `found`: there was a journal of this fleet."""

    desired: Desired
    found: bool = False


class Journal:
    """The file `journal.jsonl` in a directory of its own. Not for two processes at once: `open` takes a lock.

    `fleet` is what the command line names: URLs and dns:// names.
    """

    def __init__(self, directory: Path, fleet: Iterable[str]) -> None:
        self._directory = directory
        self._path = directory / "journal.jsonl"
        self._fleet = sorted(fleet)
        self._fd = -1
        self._lock_fd = -1
        self._lines = 0
        self._size = 0
        self._turn = threading.Lock()

    def open(self) -> Recovered:
        """Read what an earlier process left and begin to write. Raises ConfigError naming --state-dir.

        A journal none of whose replicas belongs to this fleet is another fleet's: it is set aside, not applied.
        """
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._take_lock()
            recovered = self._read()
            self._rewrite(recovered.desired)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"--state-dir: cannot use {self._directory}: {reason}; name a writable directory"
            ) from error
        return recovered

    def append(self, line: Line, desired: Desired) -> None:
        """Put one edit on disk; `desired` is the state after it. Blocks for the fsync: call it from a thread.

        Raises OSError, and leaves the file as it was: half a line would hide every later one from the next reader.
        """
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._turn:
            os.ftruncate(self._fd, self._size)  # what an earlier failure could not take back
            try:
                if armed("half-a-line"):
                    os.write(self._fd, text[: len(text) // 2])
                reach("half-a-line")
                _write_all(self._fd, text)
                reach("before-sync")
                os.fsync(self._fd)
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(text)
            self._lines += 1
            if self._lines > COMPACT_AT:
                try:
                    self._rewrite(desired)
                except OSError as error:  # the line is on disk: the edit holds, the file is only longer than need be
                    logger.warning("the journal cannot be shortened: %s", error)
                    self._lines = COMPACT_AT // 2

    def close(self) -> None:
        """Waits for a line that is being written."""
        with self._turn:
            for fd in (self._fd, self._lock_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._lock_fd = -1

    def _take_lock(self) -> None:
        self._lock_fd = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"--state-dir: {self._directory} is in use by another lorafleet; stop it or name another directory"
            ) from error

    def _read(self) -> Recovered:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return Recovered(Desired())
        desired, fleet = Desired(), set[str]()
        for text in raw.split(b"\n"):
            if not text:
                continue
            try:
                line = json.loads(text)
                if line["do"] == "fleet":
                    fleet = set(line["replicas"])
                else:
                    desired = apply(desired, line)
            except (ValueError, KeyError, TypeError):
                break
        known = fleet.union(desired.roster.added)
        if not fleet or (self._fleet and known.isdisjoint(self._fleet)):
            self._path.replace(self._path.with_suffix(".other-fleet"))
            return Recovered(Desired())
        return Recovered(for_start(desired, self._fleet, fleet), found=True)

    def _rewrite(self, desired: Desired) -> None:
        """Replace the file by a snapshot, atomically."""
        fresh = self._path.with_suffix(".new")
        lines = ({"do": "fleet", "replicas": self._fleet}, snapshot(desired))
        text = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
        with _opened(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
            _write_all(fd, text)
            os.fsync(fd)
        reach("before-snapshot")
        fd = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            fresh.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        old, self._fd, self._size, self._lines = self._fd, fd, len(text), len(lines)
        if old >= 0:
            os.close(old)
        reach("after-snapshot")
        with _opened(self._directory, os.O_RDONLY) as parent:
            os.fsync(parent)


def for_start(desired: Desired, fleet: Collection[str], before: Iterable[str]) -> Desired:
    """What an earlier life left, for a start with this command line; `before` is that of the last start."""
    named = [name for name in fleet if not name.startswith(DNS)]
    follows = any(name.startswith(DNS) for name in fleet)
    return desired.at_start(named, frozenset(before), follows=follows)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Raises OSError also when the disk takes only a part."""
    if os.write(fd, data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
