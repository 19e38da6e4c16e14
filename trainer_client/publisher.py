"""Versioned, atomic, verified adapter directories: `<root>/<name>-v<N>`.

One publish, in order: take the root's lock, ask the fleet what it has, write under a dot-prefixed temporary name,
verify, flush, write the manifest last, reserve the number, rename, ask the fleet to load, unload and delete what fell
out of the window. What follows from that order:

- Nobody sees half a version. A process that dies leaves at most a temporary directory (removed by the next publisher of
  that name) or a complete version that was never loaded (deleted when it falls out of the window).
- Anything that goes wrong before the rename leaves disk and fleet as they were.
- A load that the fleet refuses leaves the fleet as it was; the directory is removed, and the number stays taken for
  good, because a replica may have seen the name with these weights.
- A load without an answer may have happened: the directory stays, and the version is treated as loaded.
- An unload that fails does not fail the publish: the new version is live. It is tried again at the next one.

On an object-store mount (gcsfuse and its kind) the rename is a copy, so replicas may see the directory before its
files. The manifest and the digest in the load request tell a reader whether everything has arrived (see `manifest`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer_client import disk, failpoint, sources
from trainer_client.draft import commit, discard, drafted
from trainer_client.errors import FleetError, FleetRefused, FleetUnreachable, PublishError, RootBusy
from trainer_client.published import Published, Timings
from trainer_client.retention import retain
from trainer_client.rootlock import LiveMark, WriteLock, write_lock
from trainer_client.versions import check_name, next_version, version_name, versions_among, versions_on_disk

if TYPE_CHECKING:
    from trainer_client.client import FleetClient

_log = logging.getLogger("lorafleet.publisher")


class AdapterPublisher:
    """Publishes one policy, version after version, from one trainer.

    `root` is a directory that the replicas can read, under the same path or under `replica_root`. `client` (or `url`)
    is the fleet; without one, versions are only written. The newest `max_staleness + 1` versions stay loaded; files
    stay one publish longer than that, and at least for the newest `keep` versions. `max_rank` is the servers'
    --max-lora-rank, asked of the fleet when not given. `adapter_name` picks one of a PEFT model's adapters.
    `lock_secs` is how long to wait for another publish into the same root.

    A new publisher goes on where an earlier one stopped: numbers continue, versions of the earlier run count into the
    window. Call `start_run` at the start of a run that does not need them. Close it, or use it in a `with` block.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        name: str = "trl-policy",
        *,
        keep: int | None = None,
        client: FleetClient | None = None,
        url: str | None = None,
        max_staleness: int = 2,
        replica_root: str | None = None,
        max_rank: int | None = None,
        adapter_name: str | None = None,
        lock_secs: float = 600.0,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness} is negative")
        if keep is not None and keep < 1:
            raise ValueError(f"keep {keep} would not keep even the newest version")
        if replica_root is not None and not os.path.isabs(replica_root):
            raise ValueError(f"replica_root {replica_root!r} is relative; replicas need an absolute path")
        if client is not None and url is not None:
            raise ValueError("pass client or url, not both")
        self.root = os.path.abspath(os.fspath(root))
        self.name = check_name(name)
        self.keep = keep
        self.max_staleness = max_staleness
        self._client = _client_for(url) if url is not None else client
        self._owns_client = url is not None
        self._replica_root = replica_root
        self._max_rank = max_rank
        self._limits_known = False
        self.adapter_name = adapter_name
        self._lock_secs = lock_secs
        self._mutex = threading.Lock()
        self._superseded = False
        self._leftovers: frozenset[int] = frozenset()  # unloaded by start_run, files still there
        with disk.disk_errors(f"preparing {self.root}"):
            os.makedirs(self.root, exist_ok=True)
            self._live = LiveMark(self.root, self.name)
            with write_lock(self.root, self.name, lock_secs):
                self._live.show()
                for path in disk.stale_temporaries(self.root, self.name):
                    disk.remove(path)
        weakref.finalize(self, self._live.hide)
        _here.add(self)

    def __enter__(self) -> AdapterPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop counting as a live publisher. Loaded versions stay loaded."""
        self._live.hide()
        if self._owns_client and self._client is not None:
            self._client.close()

    def versions(self) -> tuple[int, ...]:
        """Numbers of the versions on disk, ascending."""
        return tuple(sorted(versions_on_disk(self.root, self.name)))

    def path_of(self, version: int) -> str:
        """Where that version's files are on this machine."""
        return os.path.join(self.root, version_name(self.name, version))

    def publish(self, source: Any, config: Any = None) -> Published:
        """Publish the next version and return when every replica serves it.

        `source` is a PEFT model (also wrapped by DDP or torch.compile), a dict of tensors (torch or numpy; `config`, a
        dict or LoraConfig, is then required) or a directory that PEFT or TRL wrote, which is copied.

        Raises AdapterError (the key at fault), DiskFull, PublishError, FleetRefused or FleetUnreachable; the top of
        this file says what each leaves behind.
        """
        started = time.perf_counter()
        taken = sources.take(source, config, self.adapter_name)
        with self._writing() as lock:
            # The fleet first: if it cannot be asked, nothing has been written yet.
            listed = self._listed()
            self._learn_limits()
            with drafted(self.root, self.name, taken, self._max_rank) as draft:
                version = commit(draft, self.root, self.name, lock, listed or frozenset())
            committed = time.perf_counter()
            self._load(version, draft.scan.digest)
            failpoint.reach("loaded")
            loaded = time.perf_counter()
            unloaded, deleted, warnings = self._retire(version, listed)
            failpoint.reach("done")
        return Published(
            version=version,
            name=version_name(self.name, version),
            path=self.path_of(version),
            digest=draft.scan.digest,
            rank=draft.facts.rank,
            bytes=draft.facts.bytes,
            all_b_zero=draft.facts.all_b_zero,
            loaded=self._client is not None,
            seconds=Timings(
                prepare=committed - started - draft.write_secs - draft.verify_secs,
                write=draft.write_secs,
                verify=draft.verify_secs,
                load=loaded - committed,
                retire=time.perf_counter() - loaded,
            ),
            unloaded=unloaded,
            deleted=deleted,
            warnings=warnings,
        )

    def start_run(self) -> tuple[str, ...]:
        """Begin anew: unload every version of this name from the fleet and remove the files of earlier runs.

        Numbers still continue above everything ever seen. Files of versions that had to be unloaded just now are
        removed at the next publish, since an engine may still be reading them; all others at once. Returns the names
        that were unloaded. A publisher of the same root and name that lives in this process (a notebook's earlier
        cell) is superseded and publishes no more.

        Raises RootBusy when a live publisher in another process uses this root and name: nothing is touched then.
        FleetRefused or FleetUnreachable when something could not be unloaded: its files stay.
        """
        with self._writing() as lock:
            self._supersede_others()
            if not self._live.alone():
                raise RootBusy(f"another live publisher uses {self.root} for {self.name}; nothing was swept")
            on_disk = versions_on_disk(self.root, self.name)
            listed = self._listed() or frozenset()
            # Remembered before anything goes, so that no number comes back even if this process dies half-way.
            highest = next_version(on_disk, listed, [lock.highest()]) - 1
            if highest > lock.highest():
                with disk.disk_errors(f"writing in {self.root}"):
                    lock.reserve(highest)
            names = tuple(version_name(self.name, v) for v in sorted(listed))
            for name in names:
                if self._client is not None:
                    self._client.unload(name, missing_ok=True)
            self._leftovers = on_disk & listed
            with disk.disk_errors(f"sweeping {self.root}"):
                for version in sorted(on_disk - listed):
                    discard(self.root, self.name, version)
            return names

    # -- steps of a publish -----------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self) -> Iterator[WriteLock]:
        with self._mutex, write_lock(self.root, self.name, self._lock_secs) as lock:
            if self._superseded:
                raise PublishError(f"a newer publisher in this process has taken over {self.name} in {self.root}")
            self._live.show()
            yield lock

    def _supersede_others(self) -> None:
        for other in list(_here):
            if other is not self and (other.root, other.name) == (self.root, self.name):
                other._superseded = True
                other._live.hide()

    def _listed(self) -> frozenset[int] | None:
        return None if self._client is None else versions_among(self.name, self._client.adapters())

    def _learn_limits(self) -> None:
        """Ask the fleet once how many adapters it holds and of which rank; refuse a window that does not fit."""
        if self._client is None or self._limits_known:
            return
        limits = self._client.limits()
        need = self.max_staleness + 2
        if limits.max_loras is not None and limits.max_loras < need:
            raise PublishError(
                f"the fleet's smallest --max-loras is {limits.max_loras}, but max_staleness {self.max_staleness} needs "
                f"{need}: {need - 1} versions that may be asked for, and the next one"
            )
        if self._max_rank is None:
            self._max_rank = limits.max_lora_rank
        self._limits_known = True

    def _load(self, version: int, digest: str) -> None:
        if self._client is None:
            return
        name = version_name(self.name, version)
        path = os.path.join(self._replica_root, name) if self._replica_root else self.path_of(version)
        try:
            self._client.load(name, path, digest)
        except FleetRefused:
            with disk.disk_errors(f"removing the refused {name}"):
                discard(self.root, self.name, version)
            raise
        except FleetUnreachable:
            _log.warning("%s may or may not be loaded: the fleet did not answer; its files stay", name)
            raise

    def _retire(
        self, version: int, listed: frozenset[int] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Unload and delete what fell out of the window. Returns names unloaded, names deleted, and what failed."""
        on_disk = versions_on_disk(self.root, self.name)
        plan = retain(version, listed=listed, on_disk=on_disk, max_staleness=self.max_staleness, keep=self.keep)
        # Unloaded by start_run, which was the one publish ago that files outlive an unload by; unless the fleet still
        # lists them because completions drain.
        swept = self._leftovers & on_disk - (listed or frozenset())
        self._leftovers -= swept
        unloaded, deleted, warnings = [], [], []
        for old in plan.unload:
            name = version_name(self.name, old)
            try:
                assert self._client is not None  # without one nothing is listed
                if self._client.unload(name, missing_ok=True):
                    unloaded.append(name)
            except FleetError as error:
                warnings.append(f"{name} was not unloaded: {error}")
        failpoint.reach("unloaded")
        for old in sorted(swept | set(plan.delete)):
            name = version_name(self.name, old)
            try:
                discard(self.root, self.name, old, failpoint.reach)
                deleted.append(name)
            except OSError as error:
                warnings.append(f"{name} was not deleted: {error}")
        for warning in warnings:
            _log.warning("%s", warning)
        return tuple(unloaded), tuple(deleted), tuple(warnings)


_here: weakref.WeakSet[AdapterPublisher] = weakref.WeakSet()


def _client_for(url: str) -> FleetClient:
    # Only here: a trainer without a fleet needs no HTTP client.
    from trainer_client.client import FleetClient

    return FleetClient(url)
