from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_client import disk
from trainer_client.errors import DiskFull, PublishError


def test_write_file_writes_all_pieces_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    disk.write_file(str(path), [b"ab", b"", memoryview(b"cd")])
    assert path.read_bytes() == b"abcd"
    with pytest.raises(FileExistsError):
        disk.write_file(str(path), [b"x"])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    disk.write_file(str(tmp_path / "f"), [bytes(range(100))])
    assert (tmp_path / "f").read_bytes() == bytes(range(100))


def test_a_copy_is_no_link(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"one")
    disk.copy_file(str(source), str(tmp_path / "copy"))
    source.write_bytes(b"two")
    assert (tmp_path / "copy").read_bytes() == b"one"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, PublishError)]
)
def test_errors_say_what_was_done(number: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="writing v3") as raised, disk.disk_errors("writing v3"):
        raise OSError(number, os.strerror(number), "/x/y")
    assert type(raised.value) is kind


def test_names_are_never_shared() -> None:
    names = {disk.temporary_name("p") for _ in range(200)}
    assert len(names) == 200
    assert all(n.startswith(".p.") and n.endswith(".tmp") and f".{os.getpid()}." in n for n in names)


def test_retired_then_removed(tmp_path: Path) -> None:
    (tmp_path / "p-v1").mkdir()
    (tmp_path / "p-v1" / "f").write_text("x")
    hidden = disk.retire(str(tmp_path), "p", "p-v1")
    assert [p.name for p in tmp_path.iterdir()] == [Path(hidden).name]
    disk.remove(hidden)
    disk.remove(hidden)
    assert list(tmp_path.iterdir()) == []


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_only_what_nobody_writes_any_more_is_stale(tmp_path: Path) -> None:
    host = disk._host()
    me, dead = os.getpid(), dead_pid()
    alive = f".p.{host}.{me}.{disk._started(me)}.00000001.tmp"
    gone = f".p.{host}.{dead}.5.00000002.tmp"
    reused = f".p.{host}.{me}.1.00000003.tmp"  # the id lives, the process that had it does not
    elsewhere = f".p.not-{host}.{dead}.5.00000004.tmp"
    abandoned = f".p.not-{host}.{dead}.5.00000005.tmp"
    others = [".p-v7.tmp", f".q.{host}.{dead}.5.00000006.tmp", "p-v1", f".p.x.{host}.{dead}.5.00000007.tmp", ".p.lock"]
    for name in (alive, gone, reused, elsewhere, abandoned, *others):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / abandoned, (1e9, 1e9))
    assert disk.stale_temporaries(str(tmp_path), "p") == sorted(str(tmp_path / n) for n in (gone, reused, abandoned))


def test_the_machine_name_fits_into_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node-3.cluster.local/ä")
    monkeypatch.setattr(os, "getpid", dead_pid)
    (tmp_path / disk.temporary_name("a.b")).mkdir()
    assert len(disk.stale_temporaries(str(tmp_path), "a.b")) == 1
    assert disk.stale_temporaries(str(tmp_path), "a") == []
