"""Unloading an adapter over the fleet: from clients at once, from the replicas when nothing runs under it any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.control import edits
from proxy.control.asking import broadcast, participants, put_back, take_off
from proxy.control.desired import Adapter
from proxy.control.loading import Verdict
from proxy.control.restoring import restore
from proxy.control.transaction import Said, Seat
from proxy.errors import NotFound, TransactionFailed
from proxy.replica_state import State

if TYPE_CHECKING:
    from proxy.control.plane import Plane
    from proxy.control.queue import Stopwatch


async def unload(plane: Plane, name: str, watch: Stopwatch) -> None:
    """Raises NotFound, Unavailable, TransactionFailed (the name stays usable)."""
    fleet = plane.fleet
    adapter = fleet.desired.adapters.get(name)
    if adapter is None:
        raise NotFound(f"The lora adapter '{name}' cannot be found.", param="lora_name")
    fleet.close(name)
    try:
        if fleet.running.get(adapter.upstream) or _keeps_away(plane, adapter):
            await plane.edit(edits.unbind(adapter))  # the reconciler takes it off the replicas when it has drained
            watch.lap("retire")
        else:
            await _unload_everywhere(plane, adapter, watch)
    finally:
        fleet.reopen(name)


async def _unload_everywhere(plane: Plane, adapter: Adapter, watch: Stopwatch) -> None:
    """Take an idle binding off every replica that may serve, or leave it on all. Raises TransactionFailed."""
    replicas = await participants(plane)

    async def ask(index: int) -> Verdict:
        return await take_off(plane, index, adapter.upstream)

    async def undo(index: int) -> Verdict:
        answer = await restore(plane, index, adapter, plane.settings.admin_timeout_secs)
        return Verdict(Said.OK if answer.ok else Said.REFUSED, answer.of(index))

    result = await broadcast(plane, replicas, ask=ask, undo=undo)
    watch.lap("unload")
    if not result.committed:
        raise result.failure(f"unloading {adapter.name!r}")
    try:
        await plane.edit(edits.unbind(adapter))
    except TransactionFailed:
        await put_back(plane, result.where(Seat.DONE), undo)
        raise
    watch.lap("commit")
    plane.freshening.soon(replicas)


def _keeps_away(plane: Plane, adapter: Adapter) -> bool:
    """Whether nobody serves and a living replica lacks this adapter: perhaps for ever, its files may be lost."""
    joining = [replica for replica in plane.fleet.members() if replica.state is State.JOINING]
    return not plane.fleet.ready() and any(adapter.upstream not in replica.holds for replica in joining)
