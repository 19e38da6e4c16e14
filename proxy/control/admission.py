"""Whether a replica belongs to this fleet at all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.replica_state import State

if TYPE_CHECKING:
    from proxy.fleet import Replica


def unfit(replica: Replica, members: Sequence[Replica], listed: int) -> str | None:
    """Why `replica` must not serve, whatever it holds; None when it may. `listed` is the number of committed adapters.

    The first member that said what it is sets the measure: one fleet serves one base model.
    """
    facts = replica.facts
    if facts is None:
        return "it has not said what it serves"
    if not facts.base_models:
        return "it lists no base model"
    if facts.data_parallel_size not in (None, 1):
        return (
            f"data_parallel_size is {facts.data_parallel_size}: a load reaches one of its engines only; start it with "
            "--data-parallel-size 1 and give lorafleet one URL per engine"
        )
    others_serve = any(member.state is State.READY for member in members if member is not replica)
    if facts.max_loras is not None and facts.max_loras < listed and others_serve:
        return f"its max_loras is {facts.max_loras}, and {listed} versions are listed; start it with more"
    first = next((member for member in members if member.facts is not None), replica)
    if first is replica or first.facts is None:
        return None
    if facts.base_models != first.facts.base_models:
        return f"it serves {facts.base_models[0]!r}, replica {first.index} serves {first.facts.base_models[0]!r}"
    return None
