"""What became of a change on each replica that took part, and how a client is told when it failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from proxy.control.loading import Verdict
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.errors import ReplicaAnswer, TransactionFailed

DEFAULT_WORDS = {
    Seat.WAITING: "not asked",
    Seat.ASKED: "not waited for",
    Seat.DONE: "done",
    Seat.UNDONE: "done, then undone",
    Seat.UNDOING: "done, not undone yet",
}


@dataclass(frozen=True, slots=True)
class Result:
    """`verdicts` of the replicas that were asked; `spoilt` has what was said by those that could not be put back."""

    transaction: Transaction
    verdicts: Mapping[int, Verdict]
    spoilt: Mapping[int, Verdict]

    @property
    def committed(self) -> bool:
        return self.transaction.phase is Phase.COMMITTED

    def where(self, *seats: Seat) -> list[int]:
        return list(self.transaction.where(*seats))

    def said(self, *what: Said) -> list[ReplicaAnswer]:
        return [verdict.answer for verdict in self.verdicts.values() if verdict.said in what]

    def of_each(self) -> list[ReplicaAnswer]:
        """A line for each participant, in the order of the transaction."""
        return [self._line(index, seat) for index, seat in self.transaction.seats.items()]

    def _line(self, index: int, seat: Seat) -> ReplicaAnswer:
        if seat in (Seat.REFUSED, Seat.LEFT):
            return self.verdicts[index].answer
        if seat is Seat.TAINTED:
            answer = self.spoilt[index].answer
            return replace(answer, message=f"done, and could not be undone: {answer.message}")
        status = self.verdicts[index].answer.status if index in self.verdicts else None
        return ReplicaAnswer(index, status, DEFAULT_WORDS[seat], at_fault=False)

    def failure(self, what: str) -> TransactionFailed:
        """The error of a change that did not happen, with a status that fits what all of the replicas said."""
        wrong = [verdict for verdict in self.verdicts.values() if verdict.said is not Said.OK]
        statuses = {verdict.answer.status for verdict in wrong if verdict.answer.status is not None}
        status = 502
        if self.said(Said.REFUSED) and len(statuses) == 1 and 400 <= (only := statuses.pop()) < 500 and only != 404:
            status = only
        ending = " and was undone on every replica"
        if not self.transaction.undoable:
            ending = ""
        elif self.spoilt:
            ending = f" and was not undone on replica {', '.join(map(str, self.spoilt))}"
        return TransactionFailed(f"{what} failed{ending}", self.of_each(), status=status, undone=not self.spoilt)
