"""Holding a replica for a request that no routing is for: tokenizing, rendering, reading something of one replica.

It leaves no trace in the routing index, needs no turn at the gate while the fleet is paused, and is told when its
replica dies, like a completion.
"""

from __future__ import annotations

from collections.abc import Callable

from proxy.errors import Unavailable
from proxy.fleet import Fleet, Replica
from proxy.lease import Served, Usage
from proxy.replica_state import State


class Errand:
    """See `proxy.web.judge.Held`."""

    __slots__ = ("_errands", "decision", "on_lost", "replica", "served")

    def __init__(self, errands: Errands, replica: Replica, served: Served | None) -> None:
        self._errands = errands
        self.replica = replica
        self.served = served
        self.decision = None
        self.on_lost: Callable[[], None] | None = None

    def first_byte(self) -> None:
        pass

    def release(self, *, ok: bool, usage: Usage | None = None) -> None:
        self._errands.running.discard(self)


class Errands:
    """All of them; `running` is empty at rest."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.running: set[Errand] = set()
        fleet.watch(self._changed)

    def take(self, served: Served | None, exclude: frozenset[int]) -> Errand:
        """The least busy replica that may be asked. Raises Unavailable when there is none."""
        candidates = self._fleet.routable(exclude)
        if not candidates:
            raise Unavailable("no replica can serve this now")
        replicas = self._fleet.replicas
        index = min(candidates, key=lambda candidate: replicas[candidate].in_flight)
        errand = Errand(self, replicas[index], served)
        self.running.add(errand)
        return errand

    def _changed(self) -> None:
        if not self.running:
            return
        for errand in [errand for errand in self.running if errand.replica.state is State.DOWN]:
            lost, errand.on_lost = errand.on_lost, None
            if lost is not None:
                lost()
