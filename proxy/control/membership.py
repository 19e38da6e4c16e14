"""Replicas that come and go while lorafleet runs: by the operator's word, which is written down, or by a DNS name's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from proxy.control import edits
from proxy.control.plane import Plane
from proxy.errors import Conflict, LorafleetError, NotFound
from proxy.replica_state import Event, State

if TYPE_CHECKING:
    from proxy.control.reconcile import Reconciler
    from proxy.fleet import Replica
    from proxy.upstream.transport import Endpoint

logger = logging.getLogger("lorafleet.control")

T = TypeVar("T")


class Membership:
    """`make_endpoint` turns a URL into an endpoint with the fleet's token, or raises BadRequest. `named` are the URLs
    of the command line.

    One word of the operator at a time; each goes on when its client leaves. All raise TransactionFailed when the
    journal cannot be written: then nothing has changed.
    """

    def __init__(
        self,
        plane: Plane,
        reconciler: Reconciler,
        make_endpoint: Callable[[object], Endpoint],
        named: Collection[str] = (),
    ) -> None:
        self._plane = plane
        self._fleet = plane.fleet
        self._reconciler = reconciler
        self._make_endpoint = make_endpoint
        self._named = frozenset(named)
        self._turn = asyncio.Lock()

    # -- the operator --------------------------------------------------------------------------------------------------

    async def add(self, url: object) -> int:
        """Its index. It joins: adapters and pause state first, traffic second. Raises BadRequest, Conflict."""
        endpoint = self._make_endpoint(url)

        async def change() -> int:
            if self.of(endpoint.base) is not None:
                raise Conflict("this replica is in the fleet already")
            await self._plane.edit(edits.join(endpoint.base))
            return self._enter(endpoint).index

        return await self._one_at_a_time(change)

    async def drain(self, index: int) -> str:
        """No new work; what it has it finishes. Returns the state. Raises NotFound; Conflict for the last replica that
        serves."""

        async def change() -> str:
            replica = self._member(index)
            self._not_the_last(replica)
            await self._plane.edit(edits.drain(replica.endpoint.base, True))
            self._fleet.apply(index, Event.DRAIN)
            return replica.state.value

        return await self._one_at_a_time(change)

    async def undrain(self, index: int) -> str:
        async def change() -> str:
            replica = self._member(index)
            await self._plane.edit(edits.drain(replica.endpoint.base, False))
            self._fleet.apply(index, Event.UNDRAIN)
            return replica.state.value

        return await self._one_at_a_time(change)

    async def remove(self, index: int) -> None:
        """Forget a replica. Raises NotFound; Conflict while it has work, or is the last one that serves."""

        async def change() -> None:
            replica = self._member(index)
            self._not_the_last(replica)
            if replica.in_flight and replica.state is not State.DOWN:
                raise Conflict(f"replica {index} has {replica.in_flight} completions in flight; drain it first")
            base, drained = replica.endpoint.base, replica.state is State.DRAINING
            # In the step of the check: nothing is sent there while this is written.
            self._fleet.apply(index, Event.DRAIN)
            try:
                await self._plane.edit(edits.leave(base, named=base in self._named))
            except BaseException:
                if not drained:
                    self._fleet.apply(index, Event.UNDRAIN)
                raise
            self._fleet.remove(index)
            logger.info("replica %d removed", index)

        return await self._one_at_a_time(change)

    def restore(self) -> None:
        """At the start: what the operator did in an earlier life, as the journal tells it (see `roster`)."""
        desired = self._fleet.desired
        for replica in self._fleet.members():
            if replica.endpoint.base in desired.roster.removed:
                logger.warning(
                    "%s was removed while lorafleet ran and stays out; `lorafleet replicas add` brings it back",
                    replica.endpoint.base,
                )
                self._fleet.remove(replica.index)
        for base in desired.roster.added:
            try:
                added = self._fleet.add(self._make_endpoint(base))
            except LorafleetError as error:
                logger.warning("a replica that was added while lorafleet ran cannot come back: %s", error.message)
                continue
            added.stale_cache = base not in desired.met
            logger.info("replica %d is %s, which was added while lorafleet ran", added.index, base)
        for replica in self._fleet.members():
            if replica.endpoint.base in desired.roster.drained:
                self._fleet.apply(replica.index, Event.DRAIN, "was drained before the start")

    # -- a DNS name ----------------------------------------------------------------------------------------------------

    def of(self, base: str) -> Replica | None:
        """The member at this address, however it is written."""
        wanted = _address(base)
        return next((r for r in self._fleet.members() if _address(r.endpoint.base) == wanted), None)

    async def found(self, base: str, *, known: bool) -> int:
        """A DNS name leads to a replica that is no member. `known`: it may have been one when the proxy last ran;
        otherwise nobody knows what its cache holds, whoever had this address before."""

        async def change() -> int:
            endpoint = self._make_endpoint(base)
            met = endpoint.base in self._fleet.desired.met
            if met and not known:
                await self._plane.edit(edits.leave(endpoint.base, named=False))
            replica = self._enter(endpoint)
            replica.stale_cache = not (met and known)
            return replica.index

        return await self._one_at_a_time(change)

    async def lost(self, index: int) -> bool:
        """A DNS name does not lead there any more: drain it, and forget it once nothing runs there. True when it is
        forgotten. Raises Conflict for the last one that serves."""

        async def change() -> bool:
            replica = self._fleet.replicas[index]
            if replica.removed:
                return True
            self._not_the_last(replica)
            if replica.state is not State.DOWN:
                self._fleet.apply(index, Event.DRAIN)
            if replica.in_flight and replica.state is not State.DOWN:
                return False
            await self._plane.edit(edits.leave(replica.endpoint.base, named=False))
            self._fleet.remove(index)
            logger.info("replica %d removed", index)
            return True

        return await self._one_at_a_time(change)

    def back(self, index: int) -> None:
        """A DNS name leads there again: what `lost` drained may serve, not what the operator did."""
        if self._fleet.replicas[index].endpoint.base not in self._fleet.desired.roster.drained:
            self._fleet.apply(index, Event.UNDRAIN)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _enter(self, endpoint: Endpoint) -> Replica:
        replica = self._fleet.add(endpoint)
        self._reconciler.start()
        logger.info("replica %d added", replica.index)
        return replica

    def _member(self, index: int) -> Replica:
        if not 0 <= index < len(self._fleet.replicas) or self._fleet.replicas[index].removed:
            raise NotFound(f"there is no replica {index}")
        return self._fleet.replicas[index]

    def _not_the_last(self, replica: Replica) -> None:
        if self._fleet.ready() == [replica]:
            raise Conflict(f"replica {replica.index} is the last one that serves; add another first")

    async def _one_at_a_time(self, change: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self._turn:
                return await change()

        task = asyncio.get_running_loop().create_task(run())
        self._plane.queue.keep(task)
        return await asyncio.shield(task)


def _address(base: str) -> tuple[str, str | None, int, str]:
    parts = urlsplit(base)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80), parts.path
