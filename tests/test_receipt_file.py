"""The file under receipts: whole lines, older ones, other hands."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.receipt_file import KEEP, ReceiptFile


def append(file: ReceiptFile, lines: bytes) -> bool:
    """True when a file was begun."""
    new = file.prepare()
    file.write(lines)
    return new


def test_lines_are_appended_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"old\n")
    file = ReceiptFile(path, 1000)
    assert append(file, b"one\ntwo\n") is False
    assert append(file, b"three\n") is False
    file.close()
    assert path.read_bytes() == b"old\none\ntwo\nthree\n"


def test_half_a_line_of_a_crash_gets_its_end(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'one\n{"id":"cm')
    append(ReceiptFile(path, 1000), b"two\n")
    assert path.read_bytes() == b'one\n{"id":"cm\ntwo\n'


def test_a_full_file_becomes_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = ReceiptFile(path, 4)
    begun = [append(file, b"%03d\n" % number) for number in range(KEEP + 4)]
    assert begun == [False] + [True] * (KEEP + 3)
    names = sorted(each.name for each in tmp_path.iterdir())
    assert names == ["r.jsonl", *(f"r.jsonl.{number}" for number in range(1, KEEP + 1))]
    assert path.read_bytes() == b"%03d\n" % (KEEP + 3)
    assert path.with_name("r.jsonl.1").read_bytes() == b"%03d\n" % (KEEP + 2)
    assert path.with_name(f"r.jsonl.{KEEP}").read_bytes() == b"003\n"


@pytest.mark.parametrize("how", ["moved", "deleted", "replaced"])
def test_a_file_that_others_took_away_is_begun_anew(tmp_path: Path, how: str) -> None:
    path = tmp_path / "r.jsonl"
    file = ReceiptFile(path, 1000)
    append(file, b"one\n")
    if how == "deleted":
        path.unlink()
    else:
        path.rename(tmp_path / "kept")
        if how == "replaced":
            path.write_bytes(b"theirs\n")
    assert append(file, b"two\n") is True
    assert path.read_bytes() == (b"theirs\ntwo\n" if how == "replaced" else b"two\n")


def test_a_write_that_fails_leaves_no_half_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    file = ReceiptFile(path, 1000)
    append(file, b"one\n")
    real = os.write
    room = iter([3])

    def full(fd: int, data: memoryview) -> int:
        for count in room:
            return real(fd, bytes(data[:count]))
        raise OSError(28, "No space left on device")

    file.prepare()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(b"two\nthree\n")
    monkeypatch.undo()
    assert path.read_bytes() == b"one\n"
    assert append(file, b"four\n") is True
    assert path.read_bytes() == b"one\nfour\n"


def test_a_directory_that_vanished_may_come_back(tmp_path: Path) -> None:
    path = tmp_path / "d" / "r.jsonl"
    path.parent.mkdir()
    file = ReceiptFile(path, 1000)
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(FileNotFoundError):
        file.prepare()
    path.parent.mkdir()
    append(file, b"one\n")
    assert path.read_bytes() == b"one\n"


def test_a_file_that_cannot_be_turned_over_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "r.jsonl"
    file = ReceiptFile(path, 4)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert [append(file, b"one\n") for _ in range(3)] == [False] * 3
    assert path.read_bytes() == b"one\n" * 3
    assert len(caplog.records) == 1 and "turned over" in caplog.text


def test_what_is_no_regular_file_is_never_renamed() -> None:
    file = ReceiptFile(Path("/dev/null"), 1)
    assert [append(file, b"one\n") for _ in range(3)] == [False] * 3
    file.close()


@pytest.mark.parametrize("what", ["no directory", "a directory", "another process"])
def test_what_cannot_be_written_is_a_wrong_setting(tmp_path: Path, what: str) -> None:
    path = tmp_path / "r.jsonl"
    if what == "no directory":
        path = tmp_path / "none" / "r.jsonl"
    elif what == "a directory":
        path.mkdir()
    else:
        other = ReceiptFile(path, 1)
        assert other.prepare() is False
    with pytest.raises(ConfigError, match=r"^--receipts") as caught:
        ReceiptFile(path, 1)
    assert "\n" not in caught.value.message and "name" in caught.value.message
