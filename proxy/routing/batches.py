"""Which prompts of a batch should go to which replica."""

from collections.abc import Sequence

from proxy.routing import affinity
from proxy.routing.blocks import Chain
from proxy.routing.index import Index
from proxy.routing.ledger import Ledger
from proxy.routing.ring import Ring


def parts(
    index: Index, ring: Ring, ledger: Ledger, chains: Sequence[Chain], candidates: Sequence[int], allowed: int
) -> dict[int, list[int]]:
    """Slots, and the positions in `chains` of the prompts that belong there.

    A prompt goes where it is held; equal prompts stay together; the new ones are spread so that no replica gets more of
    the batch than its even part, rounded up, before the others have theirs.
    """
    even = -(-len(chains) // len(candidates))
    given = dict.fromkeys(candidates, 0)
    result: dict[int, list[int]] = {}
    placed: dict[tuple[int, int, int], int] = {}
    for position, chain in enumerate(chains):
        path = index.walk(chain.seed, chain.blocks)
        holders = affinity.find(index, (chain,), (path,), allowed).holders
        key = affinity.placement_key(index, chain, path)
        name = (key, chain.size, chain.blocks[-1] if chain.blocks else 0)
        slot = placed.get(name)
        if slot is None:
            if holders:
                slot = min(holders, key=given.__getitem__)
            else:
                slot = next((s for s in ring.walk(key) if s in given and given[s] < even), ledger.least(candidates))
            placed[name] = slot
        given[slot] += 1
        result.setdefault(slot, []).append(position)
    return result
