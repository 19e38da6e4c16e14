"""Files and directories of a root: written whole, flushed, renamed, removed; nobody sees half of anything."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator

from trainer_client.errors import DiskFull, PublishError

_COPY = 4 << 20
_FOREIGN_AGE = 24 * 3600.0  # seconds after which another machine's temporary directory counts as abandoned
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn OSError into DiskFull or PublishError, with `what` was being done."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(f"{what}: no space left; nothing of it was kept, earlier versions are untouched") from error
        raise PublishError(f"{what}: {error.strerror or error} ({error.filename or 'no file named'})") from error


def write_file(path: str, pieces: Iterable[bytes | memoryview]) -> None:
    """Create `path` (it must not exist), write all of it and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in pieces:
            rest = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_file(source: str, target: str) -> None:
    """A copy of the bytes: never a link to, nor a mapping of, a file that its owner may write again."""
    with open(source, "rb", buffering=0) as handle:
        write_file(target, iter(lambda: handle.read(_COPY), b""))


def sync_directory(path: str) -> None:
    """Make entries of the directory durable. Mounts that cannot (some FUSE ones) are let off."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def temporary_name(name: str) -> str:
    """A dot-prefixed name that nobody else can have: machine, process, its start, and chance.

    Made with a plain mkdir, not tempfile: the replicas may run as another user, and the umask decides what they see.
    """
    pid = os.getpid()
    return f".{name}.{_host()}.{pid}.{_started(pid)}.{secrets.token_hex(4)}.tmp"


def remove(path: str) -> None:
    """Remove a tree; what is already gone is no error."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def retire(root: str, name: str, entry: str) -> str:
    """Take `entry` of `root` out of sight under a temporary name, at once. Returns its path, for `remove`."""
    path = os.path.join(root, temporary_name(name))
    os.rename(os.path.join(root, entry), path)
    return path


def stale_temporaries(root: str, name: str) -> list[str]:
    """Paths of temporary directories of `name` whose writer is gone.

    On this machine: its process has ended (or the id belongs to a younger one). From another machine, whose processes
    cannot be asked: nothing in it has changed for a day. TRL's own `.trl-policy-v7.tmp` is not ours and never listed.
    """
    form = re.compile(rf"\.{re.escape(name)}\.([A-Za-z0-9_-]*)\.(\d+)\.(\d+)\.[0-9a-f]{{8}}\.tmp")
    found = []
    for entry in os.listdir(root):
        match = form.fullmatch(entry)
        if not match:
            continue
        path = os.path.join(root, entry)
        host, pid, started = match[1], int(match[2]), match[3]
        if _ended(pid, started) if host == _host() else _untouched(path):
            found.append(path)
    return sorted(found)


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _started(pid: int) -> str:
    """When the process started, in clock ticks since boot (field 22 of /proc/<pid>/stat); "0" where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as handle:
            return handle.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return "0"


def _ended(pid: int, started: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return _started(pid) != started


def _untouched(path: str) -> bool:
    newest = 0.0
    for at, _, files in os.walk(path):
        for entry in (at, *(os.path.join(at, f) for f in files)):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest, os.stat(entry).st_mtime)
    return time.time() - newest > _FOREIGN_AGE
