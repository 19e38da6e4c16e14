"""Room for one more listed version, before any replica is offered it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from proxy.control import edits, slots
from proxy.control.sight import look
from proxy.errors import Conflict

if TYPE_CHECKING:
    from proxy.control.desired import Adapter
    from proxy.control.plane import Plane
    from proxy.fleet import Replica

logger = logging.getLogger("lorafleet.control")


async def make_room(plane: Plane, name: str) -> None:
    """Retire what an earlier run left when slots are short. Raises Conflict with the numbers.

    Loads that have begun (some replica holds what they load) count as listed.
    """
    fleet = plane.fleet
    max_loras = fleet.max_loras()
    coming = half_loaded(plane, name)
    room = slots.to_make_room(fleet.desired, name, max_loras, fleet.running, coming=coming)
    if room is None:
        assert max_loras is not None
        refusal = slots.refusal(fleet.desired, name, max_loras, fleet.running, coming=coming)
        raise Conflict(refusal, param="lora_name")
    for adapter in room:
        logger.warning("retiring %s, which an earlier run left, to make room for %s", adapter.name, name)
        await plane.edit(edits.unbind(adapter))


def half_loaded(plane: Plane, but: str) -> list[str]:
    """Names that a load other than that of `but` has brought to at least one replica, in their new meaning."""
    fleet = plane.fleet
    held = {upstream for replica in fleet.members() for upstream in replica.holds}
    names = {upstream.partition("@")[0] for upstream in plane.pending & held}
    return sorted(names - {but})


async def check_pushed_out(plane: Plane, replica: Replica, incoming: Adapter) -> None:
    """What could not be kept young (see `freshening`; the fleet may be paused) loses its slot to `incoming`, and is
    read again from its path when it is used next. Raises Conflict when other weights lie there by now.
    """
    capacity = replica.facts.max_loras if replica.facts else None
    gone = slots.pushed_out(replica.recent or {}, capacity, incoming.upstream, replica.running)
    for adapter in plane.fleet.desired.adapters.values():
        if adapter.upstream not in gone or adapter.name == incoming.name or adapter.digest is None:
            continue
        seen = await look(plane, adapter.path)
        if seen is not None and seen.digest != adapter.digest:
            raise Conflict(
                f"loading {incoming.name!r} would make the engine of replica {replica.index} evict {adapter.name}, "
                f"whose files have changed since it was loaded; unload {adapter.name} first",
                param="lora_name",
            )
