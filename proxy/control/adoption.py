"""What a proxy without a memory may take over from replicas that it meets. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.control.answers import Observed


def adoptable(seen: Sequence[Observed]) -> list[tuple[str, str, str]]:
    """(client name, upstream name, path) of the adapters that every replica lists alike, in the first one's order.

    An upstream name with an `@` is an alias of ours (see `desired.choose_upstream`): the client's name stands before
    it, and the newest of a name's bindings counts. What only some replicas list is left alone: nobody knows that its
    files are still the weights those replicas hold.
    """
    if not seen:
        return []
    newest: dict[str, tuple[str, str, str]] = {}
    for upstream, path in seen[0].adapters.items():
        if path is not None and all(other.adapters.get(upstream) == path for other in seen[1:]):
            name = upstream.partition("@")[0]
            newest.pop(name, None)
            newest[name] = (name, upstream, path)
    return list(newest.values())
