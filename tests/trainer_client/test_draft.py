from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_client.support import temporaries, visible, write_adapter
from trainer_client import disk
from trainer_client.digest import adapter_digest
from trainer_client.draft import commit, discard, drafted
from trainer_client.errors import AdapterError, DiskFull, PublishError
from trainer_client.manifest import check_manifest, read_manifest
from trainer_client.rootlock import write_lock


def test_a_draft_becomes_a_version(tmp_path: Path) -> None:
    source, root = write_adapter(tmp_path / "a"), str(tmp_path)
    with write_lock(root, "p", 0) as lock, drafted(root, "p", source, None) as draft:
        assert visible(tmp_path) == ["a"]
        assert draft.facts.rank == 4
        assert commit(draft, root, "p", lock, {4}) == 5
    assert visible(tmp_path) == ["a", "p-v5"]
    assert temporaries(tmp_path) == []
    manifest = read_manifest(tmp_path / "p-v5")
    assert manifest is not None
    assert (manifest.name, manifest.version, manifest.digest) == ("p-v5", 5, adapter_digest(source))
    check_manifest(tmp_path / "p-v5", manifest, contents=True)


def test_a_name_that_appears_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = write_adapter(tmp_path / "a"), str(tmp_path)
    write_adapter(tmp_path / "p-v1")
    (tmp_path / "p-v2").write_text("a file")
    monkeypatch.setattr("trainer_client.draft.versions_on_disk", lambda *_: frozenset())
    with write_lock(root, "p", 0) as lock, drafted(root, "p", source, None) as draft:
        assert commit(draft, root, "p", lock, set()) == 3
    manifest = read_manifest(tmp_path / "p-v3")
    assert manifest is not None and manifest.version == 3


def test_a_broken_adapter_leaves_nothing(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", use_dora=True)
    with pytest.raises(AdapterError, match="use_dora"), drafted(str(tmp_path), "p", source, None):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_full_disk_at_any_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The n-th write, flush, mkdir or rename of a publish finds the disk full."""
    source, root = write_adapter(tmp_path / "a"), str(tmp_path / "r")
    os.mkdir(root)
    left = [nth]

    def failing(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        return call

    with write_lock(root, "p", 0) as lock:
        for name in ("write", "fsync", "pwrite", "mkdir", "rename"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
        with pytest.raises(DiskFull, match="no space left"), drafted(root, "p", source, None) as draft:
            commit(draft, root, "p", lock, set())
        monkeypatch.undo()
    assert [p.name for p in Path(root).iterdir()] == [".p.lock"]


def test_a_rename_that_cannot_be_flushed_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = write_adapter(tmp_path / "a"), str(tmp_path / "r")
    os.mkdir(root)
    real = disk.sync_directory

    def failing(path: str) -> None:
        if path == root:
            raise OSError(errno.EIO, "I/O error")
        real(path)

    monkeypatch.setattr(disk, "sync_directory", failing)
    with (
        write_lock(root, "p", 0) as lock,
        pytest.raises(PublishError, match="I/O error"),
        drafted(root, "p", source, None) as draft,
    ):
        commit(draft, root, "p", lock, set())
    assert [p.name for p in Path(root).iterdir()] == [".p.lock"]


def test_discard_is_quiet_about_what_is_gone(tmp_path: Path) -> None:
    write_adapter(tmp_path / "p-v1")
    discard(str(tmp_path), "p", 1)
    discard(str(tmp_path), "p", 1)
    assert list(tmp_path.iterdir()) == []
