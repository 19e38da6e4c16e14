"""Replicas that come and go while lorafleet runs, by the operator's word."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.errors import Conflict
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.control.reconcile import Reconciler
    from proxy.fleet import Fleet
    from proxy.upstream.transport import Endpoint

logger = logging.getLogger("lorafleet.control")


class Membership:
    """`make_endpoint` turns a URL into an endpoint with the fleet's token, or raises BadRequest."""

    def __init__(self, fleet: Fleet, reconciler: Reconciler, make_endpoint: Callable[[object], Endpoint]) -> None:
        self._fleet = fleet
        self._reconciler = reconciler
        self._make_endpoint = make_endpoint

    def add(self, url: object) -> int:
        """Its index. It joins: adapters and pause state first, traffic second. Raises BadRequest, Conflict."""
        endpoint = self._make_endpoint(url)
        if any(replica.endpoint.base == endpoint.base for replica in self._fleet.members()):
            raise Conflict("this replica is in the fleet already")
        replica = self._fleet.add(endpoint)
        self._reconciler.start()
        logger.info("replica %d added", replica.index)
        return replica.index

    def drain(self, index: int) -> str:
        """No new work; what it has it finishes. Raises Conflict for the last replica that serves."""
        replica = self._fleet.replicas[index]
        if self._fleet.ready() == [replica]:
            raise Conflict(f"replica {index} is the last one that serves; add another first")
        self._fleet.apply(index, Event.DRAIN)
        return replica.state.value

    def undrain(self, index: int) -> str:
        self._fleet.apply(index, Event.UNDRAIN)
        return self._fleet.replicas[index].state.value

    def remove(self, index: int) -> None:
        """Forget a replica. Raises Conflict while it has work, or is the last one that serves."""
        replica = self._fleet.replicas[index]
        if self._fleet.ready() == [replica]:
            raise Conflict(f"replica {index} is the last one that serves; add another first")
        if replica.in_flight and replica.state is not State.DOWN:
            raise Conflict(f"replica {index} has {replica.in_flight} completions in flight; drain it first")
        self._fleet.remove(index)
        logger.info("replica %d removed", index)
