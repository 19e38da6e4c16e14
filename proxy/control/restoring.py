"""Give a replica what it should hold already: after a restart, after a change that was undone."""

from __future__ import annotations

from proxy.control.answers import Answer, Outcome
from proxy.control.asking import take_off
from proxy.control.desired import Adapter
from proxy.control.failpoints import reach
from proxy.control.plane import Plane
from proxy.control.sight import fingerprint, look


async def restore(plane: Plane, index: int, adapter: Adapter, timeout_secs: float) -> Answer:
    """Load a committed binding on one replica, but never other weights than the committed ones.

    Where the proxy sees the files and they have changed since, the answer is REFUSED with the reason, and nothing is
    left loaded under the name (or the replica is tainted with it).
    """
    fleet = plane.fleet
    seen = await look(plane, adapter.path, timeout_secs) if adapter.digest is not None else None
    if seen is not None and seen.digest != adapter.digest:
        return _changed(adapter)
    endpoint = fleet.replicas[index].endpoint
    reach("before-restore")
    answer = await plane.calls.load(endpoint, adapter.upstream, adapter.path, timeout_secs)
    reach("after-restore")
    if answer.outcome is Outcome.NO_ANSWER:
        fleet.taint(index, adapter.upstream, "the answer to a load was lost")
    if not answer.ok:
        return answer
    if seen is not None and await fingerprint(plane, adapter.path) != seen.fingerprint:
        fleet.taint(index, adapter.upstream, "its files changed while it was loaded")
        await take_off(plane, index, adapter.upstream)
        return _changed(adapter)
    fleet.held(index, adapter.upstream, adapter.path)
    return answer


def _changed(adapter: Adapter) -> Answer:
    return Answer(
        Outcome.REFUSED,
        None,
        f"the files of {adapter.name} are no longer the committed ones; publish again, or unload it "
        f"(lorafleet unload {adapter.name})",
    )
