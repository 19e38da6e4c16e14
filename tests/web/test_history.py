"""The ring of seconds behind the status page's charts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.web.history import MAX_MARKS, ROUTES, History, Reading


def reading(total: int, *, in_flight: int = 0, ready: int = 2) -> Reading:
    return Reading((total, 0, total, 0), total * 10, total * 5, total * 4, in_flight=in_flight, ready=ready)


def test_a_row_is_what_grew_in_its_second() -> None:
    history = History()
    history.tick(0.9, reading(3))
    history.mark("load", "committed", "p-v1")
    history.tick(2.1, reading(10, in_flight=4))
    assert history.rows() == [
        {
            "t": 0,
            "affinity": 3,
            "spill": 0,
            "new": 3,
            "fallback": 0,
            "prompt_tokens": 30,
            "predicted": 15,
            "actual": 12,
            "in_flight": 0,
            "waiting": 0,
            "ready": 2,
        },
        {
            "t": 2,
            "affinity": 7,
            "spill": 0,
            "new": 7,
            "fallback": 0,
            "prompt_tokens": 70,
            "predicted": 35,
            "actual": 28,
            "in_flight": 4,
            "waiting": 0,
            "ready": 2,
            "marks": [{"kind": "load", "outcome": "committed", "name": "p-v1"}],
        },
    ]


def test_ticks_of_one_second_are_one_row() -> None:
    history = History()
    history.mark("load", "undone", "a")
    history.tick(5.0, reading(1))
    history.mark("pause", "committed", None)
    history.tick(5.9, reading(4, in_flight=9, ready=1))
    (row,) = history.rows()
    assert (row["t"], row["affinity"], row["in_flight"], row["ready"]) == (5, 4, 9, 1)
    assert [mark["kind"] for mark in row["marks"]] == ["load", "pause"]


def test_counters_that_start_again_do_not_go_below_zero() -> None:
    history = History()
    history.tick(0, reading(100))
    history.tick(1, reading(2))
    history.tick(2, reading(5))
    assert [row["new"] for row in history.rows()] == [100, 0, 3]


def test_a_page_asks_only_for_what_it_has_not() -> None:
    history = History()
    for second in range(5):
        history.tick(second, reading(second))
    assert [row["t"] for row in history.rows(2)] == [3, 4]
    assert history.rows(4) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(0, 20)), max_size=80))
def test_it_is_bounded_ordered_and_loses_no_growth(steps: list[tuple[int, int, int]]) -> None:
    history, now, total, everything = History(seconds=10), 0.0, 0, History(seconds=1000)
    for pause, growth, marks in steps:
        now, total = now + pause / 2, total + growth
        for ring in (history, everything):
            for _ in range(marks):
                ring.mark("load", "committed", "x")
            ring.tick(now, reading(total))
    rows = history.rows()
    assert len(rows) <= 10
    assert [row["t"] for row in rows] == sorted({row["t"] for row in rows})
    assert all(len(row.get("marks", ())) <= MAX_MARKS for row in rows)
    assert sum(row["affinity"] for row in everything.rows()) == total
    assert all(row[route] >= 0 for row in rows for route in ROUTES)
