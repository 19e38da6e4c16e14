"""Who may write a root: one publish at a time, and no sweep while another publisher lives.

Two dot files a name, in the root itself so that every process (and on NFS every machine) meets at the same lock:

- `.<name>.lock` is held exclusively during a publish or a sweep. It also holds the highest number ever taken, so that a
  number is never used again, even when the version was refused or its directory is gone.
- `.<name>.live` is held shared for as long as a publisher lives, exclusively by a sweep: a sweep therefore finds out
  whether anybody else still counts on the versions it is about to remove.

The kernel drops both when a process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

from trainer_client.disk import disk_errors
from trainer_client.errors import RootBusy

_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_POLL = 0.02  # seconds between tries for a lock


class WriteLock:
    """The exclusive lock while it is held, and the number that its file remembers."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def highest(self) -> int:
        """The highest number that was ever reserved here; 0 at first."""
        text = os.pread(self._descriptor, 32, 0).split(b"\n")[0].strip()
        return int(text) if text.isdigit() else 0

    def reserve(self, version: int) -> None:
        """Remember that `version` is taken, durably. One small write in place: a crash leaves the old or the new."""
        os.pwrite(self._descriptor, b"%019d\n" % version, 0)
        os.fsync(self._descriptor)


@contextlib.contextmanager
def write_lock(root: str, name: str, wait_secs: float) -> Iterator[WriteLock]:
    """Hold the root for writing. Raises RootBusy when another publish does not end within `wait_secs`."""
    path = os.path.join(root, f".{name}.lock")
    with disk_errors(f"locking {root}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline = time.monotonic() + wait_secs
        while not _flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RootBusy(f"another publish has held {path} for {wait_secs:g} s")
            time.sleep(_POLL)
        yield WriteLock(descriptor)
    finally:
        # Not left to close(): a child forked meanwhile has a copy of the descriptor and would keep the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


class LiveMark:
    """The sign that a publisher lives. Change it only while holding the write lock."""

    def __init__(self, root: str, name: str) -> None:
        self._path = os.path.join(root, f".{name}.live")
        self._descriptor: int | None = None

    def show(self) -> None:
        """Be seen as alive from now on."""
        _flock(self._open(), fcntl.LOCK_SH)

    def alone(self) -> bool:
        """Whether no other publisher is alive. Afterwards this one is seen as alive again."""
        mine = _flock(self._open(), fcntl.LOCK_EX)
        _flock(self._open(), fcntl.LOCK_SH)
        return mine

    def hide(self) -> None:
        """Not alive any more."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        return self._descriptor


def _flock(descriptor: int, kind: int) -> bool:
    """Try for a lock without waiting. True also on a mount that knows no locks: names are claimed by rename anyway."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True
