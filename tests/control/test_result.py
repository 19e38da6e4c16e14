from __future__ import annotations

import json

import pytest

from proxy.control.loading import Verdict
from proxy.control.result import Result
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.errors import ReplicaAnswer


def verdict(index: int, said: Said, status: int | None, message: str) -> Verdict:
    return Verdict(said, ReplicaAnswer(index, status, message))


def result(seats: dict[int, Seat], *verdicts: Verdict, spoilt: tuple[Verdict, ...] = ()) -> Result:
    transaction = Transaction(tuple(seats), phase=Phase.FAILED, seats=dict(seats))
    return Result(transaction, {v.answer.replica: v for v in verdicts}, {v.answer.replica: v for v in spoilt})


def test_a_line_for_each_replica_that_took_part() -> None:
    it = result(
        {0: Seat.UNDONE, 1: Seat.REFUSED, 2: Seat.WAITING, 3: Seat.LEFT, 4: Seat.TAINTED, 5: Seat.DONE},
        verdict(0, Said.OK, 200, ""),
        verdict(1, Said.REFUSED, 400, "no"),
        verdict(3, Said.DIED, None, "stopped answering"),
        verdict(4, Said.OK, 200, ""),
        verdict(5, Said.OK, 200, ""),
        spoilt=(verdict(4, Said.REFUSED, 500, "cannot"),),
    )
    error = it.failure("loading 'a'")
    assert error.message == (
        "loading 'a' failed and was not undone on replica 4 (replica 1: 400: no; replica 3: stopped answering; "
        "replica 4: 500: done, and could not be undone: cannot)"
    )
    assert not error.undone
    assert json.loads(error.json())["error"]["replicas"] == [
        {"replica": 0, "status": 200, "message": "done, then undone"},
        {"replica": 1, "status": 400, "message": "no"},
        {"replica": 2, "status": None, "message": "not asked"},
        {"replica": 3, "status": None, "message": "stopped answering"},
        {"replica": 4, "status": 500, "message": "done, and could not be undone: cannot"},
        {"replica": 5, "status": 200, "message": "done"},
    ]


@pytest.mark.parametrize(
    ("answers", "status"),
    [
        ([400], 400),
        ([400, 400], 400),
        ([400, 409], 502),
        ([404], 502),  # TRL takes a 404 for a server that cannot load at run time
        ([500], 502),
        ([None], 502),
        ([400, None], 400),
    ],
)
def test_the_status_is_that_of_all(answers: list[int | None], status: int) -> None:
    refused = [verdict(i, Said.REFUSED, answer, "no") for i, answer in enumerate(answers)]
    seats = dict.fromkeys(range(len(answers)), Seat.REFUSED)
    assert result(seats, *refused).failure("x").status == status


def test_what_was_said() -> None:
    it = result({0: Seat.LEFT, 1: Seat.WAITING}, verdict(0, Said.DIED, None, "died"))
    assert [answer.message for answer in it.said(Said.DIED, Said.GONE)] == ["died"]
    assert it.said(Said.OK) == []
    assert it.where(Seat.WAITING) == [1]
    assert not it.committed
