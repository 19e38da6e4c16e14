"""How many new prompts each replica was given lately, counted in placements instead of seconds.

All proxies in front of the same replicas see nearly the same sequence of new prompts, so their ledgers agree, while
each sees only its own requests in flight. A placement counts less with each further one; about the last
`WINDOW * replicas` matter.
"""

from collections.abc import Sequence
from typing import Final

WINDOW: Final = 16.0
_TOO_BIG: Final = 1e100
_LATELY: Final = 16.0
"""About so many answers to new prompts tell whether others place some too."""
_SHARED: Final = 0.1


class Ledger:
    """Placements by slot."""

    def __init__(self) -> None:
        self._had: list[float] = []
        self._unit = 1.0  # what a placement counts now: it grows, which is cheaper than shrinking all that was
        self._surprises = 0.0

    @property
    def shared(self) -> bool:
        """Whether somebody else places prompts on the same replicas too: some of the last new ones were held already.

        True as well for a while after a restart, when the somebody was this proxy's earlier life, and where replicas
        keep more than the index believes.
        """
        return self._surprises > _SHARED

    def answered(self, *, surprise: bool) -> None:
        """A new prompt was answered. `surprise`: the replica held it, although this proxy knew of nobody who did."""
        self._surprises += (surprise - self._surprises) / _LATELY

    def open(self, slot: int, others: Sequence[int]) -> None:
        """A replica joins, with as much as the others have on average, so that it does not get all that is new."""
        self._had.extend([0.0] * (slot + 1 - len(self._had)))
        self._had[slot] = self.mean(others) * self._unit if others else 0.0

    def had(self, slot: int) -> float:
        return self._had[slot] / self._unit

    def mean(self, slots: Sequence[int]) -> float:
        return sum(map(self._had.__getitem__, slots)) / (self._unit * len(slots))

    def least(self, slots: Sequence[int]) -> int:
        return min(slots, key=self._had.__getitem__)

    def count(self, slot: int, weight: float, replicas: int) -> None:
        """One placement among `replicas` candidates; `weight` above one for a replica that is slower than others."""
        self._had[slot] += self._unit * weight
        self._unit /= 1.0 - 1.0 / (WINDOW * replicas)
        if self._unit > _TOO_BIG:
            self._had = [value / self._unit for value in self._had]
            self._unit = 1.0
