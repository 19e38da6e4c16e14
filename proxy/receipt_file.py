"""The file that receipts go to: appended to, turned over when it is full, and never left with half a line in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path

from proxy.errors import ConfigError

logger = logging.getLogger("lorafleet")

KEEP = 5
"""Older files that stay: FILE.1 is the newest of them."""


class ReceiptFile:
    """For one thread at a time. Call `prepare` before each `write`; a write that failed may be followed by others.

    Another process that holds the file keeps this one out (not on mounts without locks).
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Open or create it. Raises ConfigError when it cannot be written."""
        self._path = path
        self._max = max_bytes
        self._fd = -1
        self._size = 0
        self._regular = True
        self._stuck = False
        try:
            self._open()
        except OSError as error:
            mend = "name a file in a directory that exists and may be written"
            if error.errno == errno.EWOULDBLOCK:
                raise ConfigError(f"--receipts {path} is being written by another process; name another file") from None
            raise ConfigError(f"--receipts {path} cannot be written: {error.strerror}; {mend}") from None

    def prepare(self) -> bool:
        """See to it that there is a file with room; True when what comes is at the beginning of a new one.

        A file that was moved or deleted by somebody else is begun anew. Raises OSError.
        """
        if self._fd >= 0 and not self._gone():
            return self._regular and self._size >= self._max and self._turn()
        self.close()
        self._open()
        return True

    def write(self, lines: bytes) -> None:
        """Append whole lines: all of them, or none and OSError."""
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self.close()
            raise
        self._size += len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # a network mount may say only now that the disk is full
                os.close(fd)

    def _open(self) -> None:
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK:
                    raise
            found = os.fstat(fd)
            self._regular = stat.S_ISREG(found.st_mode)
            self._size = found.st_size if self._regular else 0
            if self._size and os.pread(fd, 1, self._size - 1) != b"\n":  # a crash cut the last line
                self._size += os.write(fd, b"\n")
        except OSError:
            os.close(fd)
            raise
        self._fd = fd

    def _gone(self) -> bool:
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return True
        return not os.path.samestat(there, os.fstat(self._fd))

    def _turn(self) -> bool:
        """FILE becomes FILE.1, FILE.1 becomes FILE.2 and so on; False if that is not possible: then this one grows."""
        try:
            for number in range(KEEP, 0, -1):
                older = self._named(number - 1)
                if older.exists():
                    os.replace(older, self._named(number))
        except OSError as error:
            if not self._stuck:
                logger.error("receipts: %s cannot be turned over and grows on: %s", self._path, error.strerror)
            self._stuck = True
            return False
        self._stuck = False
        self.close()
        self._open()
        return True

    def _named(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}") if number else self._path
