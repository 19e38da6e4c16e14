from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_client.errors import RootBusy
from trainer_client.rootlock import LiveMark, write_lock


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    root = str(tmp_path)
    with (
        write_lock(root, "p", 0),
        write_lock(root, "other", 0),
        pytest.raises(RootBusy, match="another publish"),
        write_lock(root, "p", 0),
    ):
        pass
    with write_lock(root, "p", 0):
        pass


def test_the_highest_number_is_remembered(tmp_path: Path) -> None:
    with write_lock(str(tmp_path), "p", 0) as lock:
        assert lock.highest() == 0
        lock.reserve(41)
        lock.reserve(1234567)
    with write_lock(str(tmp_path), "p", 0) as lock:
        assert lock.highest() == 1234567
        lock.reserve(2000000)
        assert lock.highest() == 2000000


def test_a_damaged_number_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / ".p.lock").write_text("oops\n")
    with write_lock(str(tmp_path), "p", 0) as lock:
        assert lock.highest() == 0


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    read, write = os.pipe()
    with write_lock(str(tmp_path), "p", 0):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
    os.close(read)
    try:
        with write_lock(str(tmp_path), "p", 0):
            pass
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_alone_or_not(tmp_path: Path) -> None:
    mine, other = LiveMark(str(tmp_path), "p"), LiveMark(str(tmp_path), "p")
    mine.show()
    assert mine.alone()
    other.show()
    assert not mine.alone() and not other.alone()
    other.hide()
    other.hide()
    assert mine.alone()
    assert other.alone() is False
    mine.hide()


def test_a_dead_process_is_not_alive(tmp_path: Path) -> None:
    code = (
        "import os, signal; from trainer_client.rootlock import LiveMark;"
        f"m = LiveMark({str(tmp_path)!r}, 'p'); m.show(); print('up', flush=True); input();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == "up\n"
        mine = LiveMark(str(tmp_path), "p")
        assert not mine.alone()
        other.stdin.write("\n")
        other.stdin.close()
        other.wait()
    assert mine.alone()
    mine.hide()


def test_a_mount_without_locks_is_let_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with write_lock(str(tmp_path), "p", 0):
        pass
