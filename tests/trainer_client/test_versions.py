from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.versions import (
    check_name,
    next_version,
    parse_version,
    version_name,
    versions_among,
    versions_on_disk,
)

NUMBERS = st.frozensets(st.integers(1, 10**9))


@given(NUMBERS, NUMBERS, st.integers(0, 10**9))
def test_the_next_number_is_above_all_that_were_ever_seen(
    disk: frozenset[int], fleet: frozenset[int], high: int
) -> None:
    version = next_version(disk, fleet, [high])
    assert version > max([0, *disk, *fleet, high])
    assert version - 1 in disk | fleet | {high, 0}


@given(st.integers(1, 10**17))
def test_names_and_numbers_round_trip(version: int) -> None:
    assert parse_version("trl-policy", version_name("trl-policy", version)) == version


@pytest.mark.parametrize(
    "text",
    ["p-v0", "p-v01", "p-v", "p-v-1", "p-v1 ", "p-v1\n", ".p-v1", "xp-v1", "p-v1.tmp", "pxv1", "p-v\u0661", "p-v1x"],
)
def test_other_names_are_no_versions(text: str) -> None:
    assert parse_version("p", text) is None


def test_a_dot_in_the_name_is_a_dot() -> None:
    assert versions_among("a.b", ["a.b-v1", "axb-v2", "a.b-v3"]) == {1, 3}


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "-x", "a b", "ä", "a\n", "x" * 101, ".."])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        check_name(name)


def test_whatever_has_the_name_on_disk_has_taken_the_number(tmp_path: Path) -> None:
    (tmp_path / "p-v2").mkdir()
    (tmp_path / "p-v7").write_text("a file")
    (tmp_path / ".p-v9.tmp").mkdir()
    assert versions_on_disk(str(tmp_path), "p") == {2, 7}
