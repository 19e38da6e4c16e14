"""What a request holds while a replica works for it: the only thing that raises and lowers in-flight counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from proxy.fleet import Fleet, Replica
    from proxy.routing.router import Decision


class Served(msgspec.Struct, frozen=True):
    """What a client's model name means at the moment of routing.

    `name` is what the answer's `model` says (for `<name>-latest`: the version it meant), `upstream` what the replica is
    told, `digest` that of the weights when known. `adapter` is False for a base model.
    """

    name: str
    upstream: str
    digest: str | None
    adapter: bool


class Usage(msgspec.Struct, frozen=True):
    """What a finished response said of itself; None where it did not."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    output_ids: Sequence[int] | bytes | None = None


class Lease:
    """One request on one replica. Release it exactly when the work is over, however it ended; twice does no harm.

    `on_lost` is called (at most once) when the replica is declared dead while the lease is held: whoever waits for its
    answer should stop waiting.
    """

    __slots__ = ("_fleet", "_released", "decision", "on_lost", "replica", "served", "started")

    def __init__(self, fleet: Fleet, replica: Replica, decision: Decision, served: Served | None, now: float) -> None:
        self._fleet = fleet
        self._released = False
        self.replica = replica
        self.decision = decision
        self.served = served
        self.started = now
        self.on_lost: Callable[[], None] | None = None

    def first_byte(self) -> None:
        """The replica began to answer (feeds the load estimate)."""
        self._fleet.lease_answered(self)

    def release(self, *, ok: bool, usage: Usage | None = None) -> None:
        """`ok`: the whole answer was delivered. Anything else teaches the routing nothing but lowers the counts."""
        if not self._released:
            self._released = True
            self._fleet.lease_released(self, ok=ok, usage=usage)
