"""One change over many replicas as a state machine: done on all of them, or undone on those that had done it.

Theory. A transaction has a seat for each replica that may serve when it begins. Where a change can kill an engine (a
load), one replica goes first, the canary: if it dies, nobody else is offered the change. After it the others are asked
at once. A replica that says no turns the transaction round: what was done is undone, in the same run, and the caller is
told what each one said. A replica that dies or cannot be reached leaves its seat instead: the reconciler makes it equal
before it serves again, so its absence is no reason to fail the others (unless `strict`).

    phase      answer            ->  phase       what to do
    CANARY     ok                    SPREAD      ask all others
    CANARY     refused               FAILED      -
    CANARY     died                  FAILED      - (poison: never offered to the others)
    CANARY     gone                  CANARY      ask the next one; nobody left: FAILED
    SPREAD     ok                    SPREAD      - ; the last seat settled: COMMITTED
    SPREAD     refused               UNDOING     undo where it was done (when it can be undone)
    SPREAD     died, gone            SPREAD      seat left empty; strict: as refused; nobody did it: FAILED
    UNDOING    ok (a late one)       UNDOING     undo it
    UNDOING    refused, died, gone   UNDOING     -
    UNDOING    undone                UNDOING     - ; the last seat settled: FAILED
    UNDOING    not undone            UNDOING     the replica is left TAINTED

COMMITTED and FAILED are final. The machine holds no clock and does no call: `advance` returns the effects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field


class Phase(enum.Enum):
    CANARY = "canary"
    SPREAD = "spread"
    UNDOING = "undoing"
    COMMITTED = "committed"
    FAILED = "failed"


class Seat(enum.Enum):
    WAITING = "waiting"
    ASKED = "asked"
    DONE = "done"
    REFUSED = "refused"
    LEFT = "left"
    UNDOING = "undoing"
    UNDONE = "undone"
    TAINTED = "tainted"


class Said(enum.Enum):
    OK = "ok"
    REFUSED = "refused"
    DIED = "died"
    GONE = "gone"
    UNDONE = "undone"
    NOT_UNDONE = "not undone"


@dataclass(frozen=True, slots=True)
class Ask:
    replica: int


@dataclass(frozen=True, slots=True)
class Undo:
    replica: int


Effect = Ask | Undo

OPEN = frozenset({Seat.WAITING, Seat.ASKED, Seat.UNDOING})
"""Seats that still owe an answer once the transaction spreads or turns round."""


@dataclass(slots=True)
class Transaction:
    """The machine. `begin()` once, then `advance()` with each answer, until `phase` is COMMITTED or FAILED."""

    replicas: tuple[int, ...]
    canary: bool = False
    undoable: bool = True
    strict: bool = False
    phase: Phase = Phase.SPREAD
    seats: dict[int, Seat] = field(default_factory=dict)

    def begin(self) -> list[Effect]:
        self.seats = dict.fromkeys(self.replicas, Seat.WAITING)
        if not self.replicas:
            self.phase = Phase.FAILED
            return []
        if self.canary and len(self.replicas) > 1:
            self.phase = Phase.CANARY
            return [self._ask(self.replicas[0])]
        return [self._ask(replica) for replica in self.replicas]

    def advance(self, replica: int, said: Said) -> list[Effect]:
        """Take one answer. Raises ValueError for an answer that this seat does not owe: a bug, never an input."""
        seat = self.seats[replica]
        if (said in (Said.UNDONE, Said.NOT_UNDONE)) != (seat is Seat.UNDOING) or seat not in (Seat.ASKED, Seat.UNDOING):
            raise ValueError(f"replica {replica} is {seat.value} and cannot say {said.value}")
        self.seats[replica] = {
            Said.OK: Seat.DONE,
            Said.REFUSED: Seat.REFUSED,
            Said.DIED: Seat.LEFT,
            Said.GONE: Seat.LEFT,
            Said.UNDONE: Seat.UNDONE,
            Said.NOT_UNDONE: Seat.TAINTED,
        }[said]
        if self.phase is Phase.CANARY:
            return self._after_canary(said)
        turned = said is Said.REFUSED or (self.strict and said in (Said.DIED, Said.GONE))
        if self.phase is Phase.SPREAD and turned:
            self.phase = Phase.UNDOING
        effects = self._undo_all() if self.phase is Phase.UNDOING and self.undoable else []
        self._settle()
        return effects

    def _after_canary(self, said: Said) -> list[Effect]:
        waiting = [replica for replica, seat in self.seats.items() if seat is Seat.WAITING]
        if said is Said.OK:
            self.phase = Phase.SPREAD
            effects: list[Effect] = [self._ask(replica) for replica in waiting]
            self._settle()
            return effects
        if said is Said.GONE and waiting and not self.strict:
            return [self._ask(waiting[0])]
        self.phase = Phase.FAILED
        return []

    def _ask(self, replica: int) -> Effect:
        self.seats[replica] = Seat.ASKED
        return Ask(replica)

    def _undo_all(self) -> list[Effect]:
        done = [replica for replica, seat in self.seats.items() if seat is Seat.DONE]
        for replica in done:
            self.seats[replica] = Seat.UNDOING
        return [Undo(replica) for replica in done]

    def _settle(self) -> None:
        if any(seat in OPEN for seat in self.seats.values()):
            return
        committed = self.phase is Phase.SPREAD and Seat.DONE in self.seats.values()
        self.phase = Phase.COMMITTED if committed else Phase.FAILED

    @property
    def final(self) -> bool:
        return self.phase in (Phase.COMMITTED, Phase.FAILED)

    def where(self, *seats: Seat) -> Iterable[int]:
        return (replica for replica, seat in self.seats.items() if seat in seats)
