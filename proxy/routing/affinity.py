"""What the index says of a request: who holds it already, and what a new prompt is placed by."""

from collections.abc import Sequence
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from proxy.routing.blocks import EDGES, Chain
from proxy.routing.index import Index
from proxy.routing.runs import Node, Path, bits

COMMON: Final = 0.25
"""What this part of the new prompts begins with says nothing about where one of them belongs."""
MATURE: Final = 8
"""So many new prompts must have been seen before what only one of them had says something about where it belongs."""
_COMPARED: Final = 8
"""With more holders than this, all are taken to hold as much as they ever did."""


class Found(msgspec.Struct, frozen=True, gc=False):
    """The slots that hold the longest part of a continuation, how many tokens that is, and how often it was asked.

    No holders when nothing is held but what different prompts share.
    """

    holders: tuple[int, ...]
    tokens: float
    asked: int


NOTHING: Final = Found((), 0.0, 0)


def find(index: Index, chains: Sequence[Chain], paths: Sequence[Path], allowed: int) -> Found:
    """Look for the prompts (for a batch: the one that saves most) among the slots in the mask `allowed`."""
    if len(chains) == 1:  # nearly always
        return _find(index, chains[0], paths[0], allowed)
    found = [_find(index, chain, path, allowed) for chain, path in zip(chains, paths, strict=True)]
    return max(found, key=_tokens, default=NOTHING)


def _tokens(found: Found) -> float:
    return found.tokens


def _find(index: Index, chain: Chain, path: Path, allowed: int) -> Found:
    size = len(chain.blocks)
    for node, matched in reversed(path):
        mask = node.mask & allowed
        if mask and (continues(node, matched, size) or (_forks(node, matched, size) and _mature(index, chain))):
            return _deepest(index, path, mask, chain, node.asked)
    return NOTHING


def continues(node: Node, matched: int, size: int) -> bool:
    """Whether a prompt of `size` blocks that matches the run this far goes on where an earlier one ended."""
    return (node.asked > 0 and matched == len(node.blocks)) or node.start + matched == size


def _forks(node: Node, matched: int, size: int) -> bool:
    """Whether a prompt leaves a run that only one prompt ever took, after more than half of its own way.

    Two branches of a conversation whose common turns were never seen: another proxy had them, or an earlier life.
    """
    return node.prompts == 1 and 2 * (node.start + matched) > size


def _mature(index: Index, chain: Chain) -> bool:
    root = index.root(chain.seed)
    return root is not None and root.prompts >= MATURE


def placement_key(index: Index, chain: Chain, path: Path) -> int:
    """The prompt's first block after what many prompts begin with; equal for all turns of a conversation."""
    if not chain.blocks:
        return xxh3_64_intdigest(chain.tail, chain.seed)
    root = index.root(chain.seed)
    many = max(2.0, COMMON * root.prompts) if root is not None else 2.0
    at = 0
    for node, matched in path:
        if node.prompts < many and matched == len(node.blocks):
            break
        at = node.start + matched
    return chain.blocks[min(at, len(chain.blocks) - 1)]


def _deepest(index: Index, path: Path, mask: int, chain: Chain, asked: int) -> Found:
    holders = bits(mask)
    if len(holders) == 1 or len(holders) > _COMPARED:
        return Found(holders, EDGES[index.depth(path, holders[0])] * chain.tokens_per_byte, asked)
    depths = [index.depth(path, slot) for slot in holders]
    most = max(depths)
    if depths.count(most) < len(depths):
        holders = tuple([slot for slot, depth in zip(holders, depths, strict=True) if depth == most])
    return Found(holders, EDGES[most] * chain.tokens_per_byte, asked)
