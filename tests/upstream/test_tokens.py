import copy
import logging
import os
import pickle
import traceback
from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.upstream.tokens import TokenSource

CANARY = "hf_canary7Q"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{CANARY}\n")
    return path


def replace(path: Path, text: str) -> None:
    """Write as `mv` and Kubernetes do: another file under the same name."""
    other = path.with_name("other")
    other.write_text(text)
    os.replace(other, path)


def test_none() -> None:
    assert TokenSource.none()() is None


def test_environment() -> None:
    source = TokenSource.from_environment("HF_TOKEN", {"HF_TOKEN": f" {CANARY}\n"})
    assert source() == CANARY


@pytest.mark.parametrize("value", [None, "", "  ", "two words", "a\nb", "a\tb", "a\0b", "tökén"])
def test_unusable_environment(value: str | None) -> None:
    with pytest.raises(ConfigError, match="HF_TOKEN") as caught:
        TokenSource.from_environment("HF_TOKEN", {} if value is None else {"HF_TOKEN": value})
    assert not (value and value.strip()) or value not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"a\nb", b"\xff\xfe", b"x" * 70_000])
def test_unusable_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=str(path)):
        TokenSource.from_file(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenSource.from_file(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenSource.from_file(tmp_path)


def test_changed_file_is_read_again(path: Path, clock: Clock) -> None:
    source = TokenSource.from_file(path, clock)
    assert source() == CANARY
    replace(path, "second")
    assert source() == CANARY  # not looked at yet
    clock.now += 0.5
    assert source() == "second"
    path.write_text("third!")  # same file, same length
    os.utime(path, ns=(1, 1))
    clock.now += 0.5
    assert source() == "third!"


def test_unchanged_file_is_not_read_again(path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TokenSource.from_file(path, clock)
    looks = []
    monkeypatch.setattr(TokenSource, "_load", lambda self: pytest.fail("read"))
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *args: looks.append(args) or stat(*args))
    for _ in range(100):
        clock.now += 0.01
        assert source() == CANARY
    assert len(looks) == 2


def test_last_good_token_stays(path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    source = TokenSource.from_file(path, clock)

    def look() -> str | None:
        clock.now += 0.5
        return source()

    with caplog.at_level(logging.DEBUG):
        path.unlink()
        assert [look() for _ in range(3)] == [CANARY] * 3
        assert len(caplog.records) == 1  # said once
        replace(path, f"half {CANARY}")
        assert [look() for _ in range(3)] == [CANARY] * 3
        assert len(caplog.records) == 1
        replace(path, "second")
        assert look() == "second"
        path.unlink()
        assert [look() for _ in range(3)] == ["second"] * 3
        assert len(caplog.records) == 2
    assert CANARY not in caplog.text
    assert "second" not in caplog.text


def test_file_written_in_place_is_never_half_used(path: Path, clock: Clock) -> None:
    source = TokenSource.from_file(path, clock)
    path.write_text("")
    clock.now += 0.5
    assert source() == CANARY
    path.write_text("second")
    clock.now += 0.5
    assert source() == "second"


def test_never_shown(path: Path) -> None:
    for source in (TokenSource.from_file(path), TokenSource.from_environment("T", {"T": CANARY})):
        for text in (repr(source), str(source), f"{source}", f"{[source]}"):
            assert CANARY not in text
        for leak in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError) as caught:
                leak(source)
            assert CANARY not in "".join(traceback.format_exception(caught.value))
