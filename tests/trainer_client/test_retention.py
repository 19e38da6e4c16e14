from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_client.retention import Retention, retain


@pytest.mark.parametrize(
    ("current", "listed", "on_disk", "staleness", "keep", "expected"),
    [
        (1, [], [1], 2, None, Retention((), ())),
        (3, [1, 2], [1, 2, 3], 2, None, Retention((), ())),
        (4, [1, 2, 3], [1, 2, 3, 4], 2, None, Retention((1,), ())),
        (5, [2, 3, 4], [1, 2, 3, 4, 5], 2, None, Retention((2,), (1,))),
        (5, [2, 3, 4], [1, 2, 3, 4, 5], 2, 9, Retention((2,), ())),
        (5, [4], [3, 4, 5], 0, None, Retention((4,), (3,))),
        (5, [1, 2, 3, 4], [1, 2, 3, 4, 5], 2, None, Retention((1, 2), ())),
        # 4 was written and never loaded: it takes no place in the loaded window
        (5, [1, 2, 3], [1, 2, 3, 4, 5], 2, None, Retention((1,), ())),
        (9, [7, 8], [3, 4, 7, 8, 9], 2, None, Retention((), (3,))),
        (5, None, [1, 2, 3, 4, 5], 2, None, Retention((), (1,))),
        (5, [6, 7], [5, 6, 7], 0, None, Retention((), ())),
    ],
)
def test_the_window(
    current: int, listed: list[int] | None, on_disk: list[int], staleness: int, keep: int | None, expected: Retention
) -> None:
    known = None if listed is None else set(listed)
    assert retain(current, listed=known, on_disk=set(on_disk), max_staleness=staleness, keep=keep) == expected


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 30))
def test_what_holds_over_a_whole_run(staleness: int, keep: int, publishes: int) -> None:
    loaded: set[int] = set()
    files: set[int] = set()
    unloaded_before: set[int] = set()
    for current in range(1, publishes + 1):
        files.add(current)
        plan = retain(current, listed=loaded, on_disk=files, max_staleness=staleness, keep=keep)
        loaded = (loaded | {current}) - set(plan.unload)
        files -= set(plan.delete)
        assert loaded == set(range(max(1, current - staleness), current + 1))
        assert set(plan.unload) | loaded <= files
        assert set(plan.delete) <= unloaded_before
        assert len(files) == min(current, max(keep, staleness + 2))
        unloaded_before |= set(plan.unload)
