"""A version before it has a number: a complete, verified directory under a temporary name."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from trainer_client import disk, failpoint, sources
from trainer_client.digest import AdapterScan, scan_adapter
from trainer_client.manifest import MANIFEST_FILE, Manifest
from trainer_client.rootlock import WriteLock
from trainer_client.verify import AdapterFacts, verify_adapter
from trainer_client.versions import next_version, version_name, versions_on_disk


@dataclass(frozen=True, slots=True)
class Draft:
    """The temporary directory and what is in it. Seconds are of writing (with its flush) and of checking."""

    directory: str
    facts: AdapterFacts
    scan: AdapterScan
    write_secs: float
    verify_secs: float


@contextlib.contextmanager
def drafted(root: str, name: str, source: sources.Weights | Path, max_rank: int | None) -> Iterator[Draft]:
    """Write and verify `source` under a temporary name in `root`; whatever still has that name at the end is removed.

    Raises DiskFull or PublishError for what the disk says, AdapterError for what the adapter is.
    """
    directory = os.path.join(root, disk.temporary_name(name))
    try:
        with disk.disk_errors(f"writing a version of {name} in {root}"):
            started = time.perf_counter()
            os.mkdir(directory)
            failpoint.reach("temporary")
            sources.write(source, directory)
            written = time.perf_counter()
            facts = verify_adapter(directory, max_rank=max_rank)
            scan = scan_adapter(directory)
            failpoint.reach("verified")
            yield Draft(directory, facts, scan, written - started, time.perf_counter() - written)
    finally:
        with contextlib.suppress(OSError):
            disk.remove(directory)


def commit(draft: Draft, root: str, name: str, lock: WriteLock, listed: Set[int]) -> int:
    """Give the draft the next number and its name. Returns the number. Raises OSError as the disk says.

    The number is above every one on disk, in `listed` and ever reserved. The rename itself claims the name: should a
    directory of that name appear meanwhile (a writer that takes no locks), the next number is tried.
    """
    version = next_version(versions_on_disk(root, name), listed, [lock.highest()])
    while True:
        target = os.path.join(root, version_name(name, version))
        _write_manifest(draft, version_name(name, version), version)
        lock.reserve(version)
        failpoint.reach("reserved")
        try:
            os.rename(draft.directory, target)
            break
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            version += 1
    try:
        disk.sync_directory(root)
    except OSError:
        discard(root, name, version)
        raise
    failpoint.reach("renamed")
    return version


def discard(root: str, name: str, version: int, reached: Callable[[str], None] = lambda _: None) -> None:
    """Remove a version's directory: out of sight first, at once, then its files. Raises OSError as the disk says."""
    with contextlib.suppress(FileNotFoundError):
        hidden = disk.retire(root, name, version_name(name, version))
        reached("retired")
        disk.remove(hidden)


def _write_manifest(draft: Draft, full_name: str, version: int) -> None:
    path = os.path.join(draft.directory, MANIFEST_FILE)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    disk.write_file(path, [Manifest(full_name, version, draft.scan.digest, draft.scan.files).to_bytes()])
    disk.sync_directory(draft.directory)
    failpoint.reach("manifest")
