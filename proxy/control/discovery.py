"""Replicas behind one DNS name: who is new, who is gone. The look-up is passed in; nothing here touches the network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.errors import LorafleetError
from proxy.replica_state import State

if TYPE_CHECKING:
    from proxy.control.membership import Membership
    from proxy.fleet import Fleet

logger = logging.getLogger("lorafleet.control")

GONE_AFTER = 3
"""Look-ups in a row that must leave an address out before its replica is drained: a resolver can answer in part."""


@dataclass(frozen=True, slots=True)
class Group:
    """All replicas that `name` resolves to, each at `port`, spoken to by http. Written `dns://name:port`."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"dns://{self.name}:{self.port}"


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(name, port) to base URLs; raises OSError when the name cannot be resolved."""


class Follower:
    """Keeps the fleet's membership equal to what one name resolves to."""

    def __init__(self, group: Group, fleet: Fleet, membership: Membership, resolve: Resolve, every_secs: float) -> None:
        self._group = group
        self._fleet = fleet
        self._membership = membership
        self._resolve = resolve
        self._every_secs = every_secs
        self._known: dict[str, int] = {}
        self._missed: dict[str, int] = {}
        self._complained = False

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._every_secs)

    async def look(self) -> None:
        """One look-up. A failed one changes nothing: a resolver that is down is no reason to lose replicas."""
        try:
            found = set(await self._resolve(self._group.name, self._group.port))
        except OSError as error:
            if not self._complained:
                logger.warning("%s cannot be resolved (%s); keeping what is known", self._group, error)
            self._complained = True
            return
        self._complained = False
        for base in sorted(found - self._known.keys()):
            try:
                self._known[base] = self._membership.add(base)
            except LorafleetError as error:
                logger.warning("%s: %s", self._group, error.message)
        for base in found & self._known.keys():
            if self._missed.pop(base, 0) >= GONE_AFTER:
                self._membership.undrain(self._known[base])
        for base in self._known.keys() - found:
            self._missed[base] = self._missed.get(base, 0) + 1
            if self._missed[base] >= GONE_AFTER:
                self._let_go(base)

    def _let_go(self, base: str) -> None:
        """Drain it, and forget it once nothing runs there. The last one that serves stays."""
        index = self._known[base]
        replica = self._fleet.replicas[index]
        try:
            if replica.state not in (State.DRAINING, State.DOWN):
                self._membership.drain(index)
            if replica.state is State.DOWN or not replica.in_flight:
                self._membership.remove(index)
                del self._known[base]
                self._missed.pop(base, None)
        except LorafleetError as error:
            logger.info("%s is no longer in %s but stays: %s", f"replica {index}", self._group, error.message)
