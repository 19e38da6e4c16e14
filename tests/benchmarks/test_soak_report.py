from collections import Counter

from benchmarks.soak_report import Course, at_rest, failed, faults, growth, report_of, rows_of
from benchmarks.soak_rollouts import Tally


def calm() -> Course:
    return Course(publishes=[0.1], back=[0.5], samples=[(0.0, 10, 3), (50.0, 30, 4), (60.0, 30, 5)])


def test_growth_leaves_out_the_warm_up() -> None:
    assert growth([(0.0, 0, 1), (30.0, 600, 1), (60.0, 600, 1), (90.0, 660, 1)], 60) == 120


def test_faults_are_told_apart_by_their_text() -> None:
    log = [
        "2026-12-01 01:00:00,100 ERROR lorafleet: replica 3 said 17",
        "2026-12-01 01:00:01,200 ERROR lorafleet: replica 2 said 1",
        "2026-12-01 01:00:01,200 WARNING lorafleet.web: an answer was cut short",
        "Traceback (most recent call last):",
    ]
    assert faults(log) == Counter(
        {"ERROR lorafleet: replica N said N": 2, "Traceback (most recent call last):": 1},
    )


def test_at_rest() -> None:
    view = {
        "replicas": [{"in_flight": 0}, {"in_flight": 2}],
        "routing": {"in_flight": 2, "waiting": 0},
        "adapters": [{"upstream": "v1", "in_flight": 0}],
        "total": 2,
        "ready": 1,
        "paused": False,
    }
    states = [{"running": 0, "waiting": 0, "adapters": {"v1": {}}}, {"running": 1, "waiting": 1, "adapters": {}}]
    found = at_rest(view, states)
    assert {what: count for what, count in found.items() if count} == {
        "in flight (replicas)": 2,
        "in flight (all)": 2,
        "running on replicas": 2,
        "replicas not ready": 1,
        "replicas that hold other adapters": 1,
    }


def test_a_calm_run_passes_and_each_fault_does_not() -> None:
    assert failed(report_of(Tally(answered=5), calm(), 1.0, [])) == []
    ill = calm()
    ill.refused.append("no")
    ill.rest = {"waiting": 2, "paused": 0}
    tally = Tally(wrong=["v1 was answered as v2"], failed=Counter({"503 no": 2}))
    assert failed(report_of(tally, ill, 1.0, ["1 2 ERROR x"])) == [
        "failed completions: 2",
        "wrong answers: 1",
        "publishes failed: 1",
        "errors logged: 1",
        "held at rest: 2",
    ]


def test_the_table_shows_what_went_wrong() -> None:
    tally = Tally(answered=5, failed=Counter({"503 no replica": 2}))
    shown = dict(rows_of(report_of(tally, calm(), 1.0, [])))
    assert shown["failed completions"] == "2\n2 x 503 no replica"
    assert shown["wrong answers"] == "0"
