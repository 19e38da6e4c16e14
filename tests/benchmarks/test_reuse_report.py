import json

from benchmarks.offline_workloads import Workload
from benchmarks.reuse_load import Outcome, as_text, merged
from benchmarks.reuse_report import Found, cell, lines, markdown, panels, record, timed
from benchmarks.reuse_rows import Row

ROW = Row(Workload("grouped", []), replicas=2, concurrency=16, faster=8.0)
EVEN = Outcome("lorafleet prefix", 8, 0, 1000, 790, 210, 800, [4, 4], wall=2.0)
TURNS = Outcome("lorafleet round_robin", 8, 0, 1000, 400, 600, 800, [4, 4], wall=2.5, others=0.5)
ONE = Outcome("other", 8, 1, 1000, 800, 200, 800, [8, 0], wall=4.0)
FOUND = Found(ROW, {each.peer: each for each in (EVEN, TURNS, ONE)})
PEERS = ["lorafleet prefix", "lorafleet round_robin", "other", "absent"]


def test_a_cell_says_reuse_balance_time_and_what_is_bad() -> None:
    assert cell(EVEN, "**") == "0.988, 1.00, 2.0 s"
    assert cell(TURNS, "**") == "0.500, 1.00, 2.5 s?"
    assert cell(ONE, "**") == "1.000, **2.00**, 4.0 s, **1 failed**"
    assert cell(None) == ""


def test_tables() -> None:
    assert lines([FOUND], PEERS) == [
        ["workload", "fleet", "possible", *PEERS],
        ["grouped", "2 x 16", "0.800", "0.988, 1.00, 2.0 s", "0.500, 1.00, 2.5 s?", "1.000, 2.00, 4.0 s, 1 failed", ""],
    ]
    assert timed([FOUND], PEERS, "**") == [
        ["workload", "round robin", "lorafleet prefix", "other", "absent"],
        ["grouped", "2.50 s, 0.50", "0.80?, 0.99", "**1.60**?, 1.00", ""],
    ]
    assert markdown([["a", "b"], ["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n"


def test_json() -> None:
    written = json.loads(json.dumps(record(FOUND)))
    assert written["fleet"]["replicas"] == 2 and written["fleet"]["capacity_blocks"] is None
    assert written["peers"]["other"]["balance"] == 2.0 and written["peers"]["other"]["shares"] == [8, 0]


def test_the_picture_has_a_panel_for_each_question() -> None:
    found = panels([FOUND], [FOUND])
    assert [panel.groups["grouped"]["other"] for panel in found] == [1.0, 2.0, 1.6]
    assert panels([], []) == []


def test_rounds_add_up_and_their_time_is_the_mean() -> None:
    whole = merged([EVEN, Outcome("lorafleet prefix", 8, 1, 1000, 800, 200, 800, [2, 6], wall=4.0)])
    assert (whole.requests, whole.failed, whole.cached, whole.shares, whole.wall) == (16, 1, 1590, [6, 10], 3.0)


def test_text_is_as_long_as_the_tokens_and_equal_where_they_are() -> None:
    one, other = as_text([3, 149_999, 7]), as_text([3, 149_999, 8])
    assert len(one.encode()) == 3 and one.isprintable() and one[:2] == other[:2] and one != other
