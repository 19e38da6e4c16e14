from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.control import edits
from proxy.control.desired import Adapter, Desired, Pause
from proxy.control.edits import Line
from proxy.control.journal import Journal, Recovered
from proxy.control.roster import Roster
from proxy.errors import ConfigError

A, B, C = "http://a:8000", "http://b:8000", "http://c:8000"

urls = st.sampled_from([A, B, C])
upstreams = st.sampled_from(["v1", "v2", "v1@abc"])
digests = st.sampled_from([None, "sha256:1", "sha256:2"])
adapters = st.builds(Adapter, st.sampled_from(["v1", "v2"]), st.sampled_from(["/x", "/y"]), digests, upstreams)
lines = st.one_of(
    st.builds(edits.reserve, upstreams, digests),
    st.builds(edits.bind, adapters),
    st.builds(edits.unbind, adapters),
    st.builds(edits.retired, upstreams),
    st.builds(edits.pause, st.none() | st.builds(Pause, st.just("mode=keep"), st.just(5.0), st.booleans())),
    st.builds(edits.sleep, st.none() | st.just("level=1")),
    st.builds(edits.next_epoch, st.lists(urls)),
    st.builds(edits.met, urls),
    st.builds(edits.join, urls),
    st.builds(edits.leave, urls, named=st.booleans()),
    st.builds(edits.drain, urls, st.booleans()),
)


def after(*said: Line) -> Desired:
    desired = Desired()
    for line in said:
        desired = edits.apply(desired, line)
    return desired


@given(st.lists(lines))
def test_a_snapshot_is_all_edits_so_far(said: list[Line]) -> None:
    desired = after(*said)
    assert edits.apply(Desired(), edits.snapshot(desired)) == desired


def test_a_snapshot_of_before_there_was_a_roster() -> None:
    old = {key: value for key, value in edits.snapshot(Desired()).items() if key not in ("added", "removed", "drained")}
    assert edits.apply(Desired(), old) == Desired()


@pytest.mark.parametrize("line", [{}, {"do": "nonsense"}, {"do": "bind"}, {"do": "join"}])
def test_what_is_no_edit(line: Line) -> None:
    with pytest.raises((KeyError, ValueError)):
        edits.apply(Desired(), line)


class Lives:
    """One state directory, started again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.desired = Desired()
        self.journal: Journal | None = None

    def start(self, *fleet: str) -> Recovered:
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal(self.root, fleet)
        recovered = self.journal.open()
        self.desired = recovered.desired
        return recovered

    def say(self, *said: Line) -> None:
        assert self.journal is not None
        for line in said:
            self.desired = edits.apply(self.desired, line)
            self.journal.append(line, self.desired)


@pytest.fixture
def lives(tmp_path: Path) -> Any:
    it = Lives(tmp_path / "state")
    yield it
    if it.journal is not None:
        it.journal.close()


def test_what_was_said_is_there_again(lives: Lives) -> None:
    assert lives.start(A, B) == Recovered(Desired())
    lives.say(edits.bind(Adapter("v1", "/x", None, "v1")), edits.join(C), edits.drain(B, True), edits.met(A))
    said = lives.desired
    assert lives.start(A, B) == Recovered(said, found=True)
    assert lives.start(A, B) == Recovered(said, found=True)
    assert said.roster == Roster((C,), frozenset(), frozenset({B}))


def test_half_a_line_is_no_line(lives: Lives) -> None:
    lives.start(A)
    lives.say(edits.met(A))
    said = lives.desired
    with open(lives.root / "journal.jsonl", "ab") as file:
        file.write(b'{"do":"next_ep')
    assert lives.start(A).desired == said


def test_a_replica_that_left_is_unknown_when_it_comes_back(lives: Lives) -> None:
    lives.start(A, B)
    lives.say(edits.met(A), edits.met(B), edits.leave(B, named=True))
    assert lives.start(A, B).desired.met == {A}
    lives.say(edits.join(B))
    assert lives.start(A, B).desired.met == {A}


def test_a_replica_that_a_start_left_out_is_unknown_when_it_comes_back(lives: Lives) -> None:
    lives.start(A, B)
    lives.say(edits.met(A), edits.met(B))
    assert lives.start(A, B).desired.met == {A, B}
    assert lives.start(A, "dns://name:1").desired.met == {A}
    assert lives.start(A, B, "dns://name:1").desired.met == {A}


def test_addresses_of_a_name_are_known_at_the_next_start_of_that_name(lives: Lives) -> None:
    lives.start("dns://name:1")
    lives.say(edits.met(A))
    assert lives.start("dns://name:1").desired.met == {A}
    assert lives.start("dns://name:1", B).desired.met == {A}
    lives.say(edits.leave(A, named=False))
    assert lives.start("dns://name:1").desired.met == set()


def test_the_journal_of_another_fleet_is_set_aside(lives: Lives) -> None:
    lives.start(A)
    lives.say(edits.met(A), edits.join(B))
    assert not lives.start(C).found
    assert lives.journal is not None and (lives.root / "journal.other-fleet").exists()


def test_a_fleet_that_moved_to_what_was_added_is_the_same(lives: Lives) -> None:
    lives.start(A)
    lives.say(edits.join(B), edits.leave(A, named=True), edits.bind(Adapter("v1", "/x", None, "v1")))
    recovered = lives.start(B)
    assert recovered.found and recovered.desired.roster == Roster()
    assert list(recovered.desired.adapters) == ["v1"]


def test_two_at_once(lives: Lives) -> None:
    lives.start(A)
    with pytest.raises(ConfigError, match="in use by another lorafleet"):
        Journal(lives.root, [A]).open()


def test_a_disk_that_is_full_leaves_the_file_as_it_was(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    lives.start(A)
    lives.say(edits.met(A))
    size = os.stat(lives.root / "journal.jsonl").st_size
    real = os.write

    def half(fd: int, data: bytes) -> int:
        return real(fd, data[: len(data) // 2])

    with monkeypatch.context() as broken:
        broken.setattr("os.write", half)
        assert lives.journal is not None
        with pytest.raises(OSError, match="No space"):
            lives.journal.append(edits.join(B), lives.desired)
    assert os.stat(lives.root / "journal.jsonl").st_size == size
    lives.say(edits.join(C))
    assert lives.start(A).desired.roster.added == (C,)


def test_a_long_journal_is_shortened(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.control.journal.COMPACT_AT", 10)
    lives.start(A)
    lives.say(edits.join(B), *[edits.drain(A, bool(n % 2)) for n in range(60)])
    said = lives.desired
    assert len((lives.root / "journal.jsonl").read_bytes().splitlines()) <= 12
    assert lives.start(A).desired == said
