"""Replicas behind one DNS name: who is new, who is gone. The look-up is passed in; nothing here touches the network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.errors import LorafleetError

if TYPE_CHECKING:
    from proxy.control.membership import Membership

logger = logging.getLogger("lorafleet.control")

DNS = "dns://"

GONE_AFTER = 3
"""Look-ups in a row that must leave an address out before its replica is drained: a resolver can answer in part."""


@dataclass(frozen=True, slots=True)
class Group:
    """All replicas that `name` resolves to, each at `port`, spoken to by http. Written `dns://name:port`."""

    name: str
    port: int

    def __str__(self) -> str:
        return f"{DNS}{self.name}:{self.port}"


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(name, port) to base URLs; raises OSError when the name cannot be resolved."""


class Follower:
    """Keeps the fleet's membership equal to what one name resolves to."""

    def __init__(self, group: Group, membership: Membership, resolve: Resolve, every_secs: float) -> None:
        self._group = group
        self._membership = membership
        self._resolve = resolve
        self._every_secs = every_secs
        self._known: dict[str, int] = {}
        self._missed: dict[str, int] = {}
        self._first = True
        self._complained = False

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Exception:
                logger.exception("%s: the look-up stumbled and goes on", self._group)
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
            if self._membership.of(base) is None:  # else it is named or was added; then it is not ours to take away
                try:
                    self._known[base] = await self._membership.found(base, known=self._first)
                except LorafleetError as error:
                    logger.warning("%s: %s", self._group, error.message)
        self._first = False
        for base in sorted(self._known.keys() & found):
            if self._missed.pop(base, 0) >= GONE_AFTER:
                self._membership.back(self._known[base])
        for base in sorted(self._known.keys() - found):
            self._missed[base] = self._missed.get(base, 0) + 1
            if self._missed[base] >= GONE_AFTER:
                await self._let_go(base)

    async def _let_go(self, base: str) -> None:
        """The last one that serves stays, and is tried again at the next look-up."""
        index = self._known[base]
        try:
            if await self._membership.lost(index):
                del self._known[base]
                del self._missed[base]
        except LorafleetError as error:
            logger.info("replica %d is no longer in %s but stays: %s", index, self._group, error.message)
