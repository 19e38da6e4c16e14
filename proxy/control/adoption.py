"""What a proxy without a memory may take over from replicas that it meets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.control.answers import Observed


def adoptable(seen: Sequence[Observed]) -> list[tuple[str, str]]:
    """(name, path) of the adapters that every replica lists alike, in the first replica's order.

    What only some of them list is left alone: nobody knows that its files are still the weights those replicas hold.
    """
    if not seen:
        return []
    return [
        (name, path)
        for name, path in seen[0].adapters.items()
        if path is not None and all(other.adapters.get(name) == path for other in seen[1:])
    ]
