"""What the index is made of: runs of blocks, and what each replica holds of them."""

from array import array
from collections import OrderedDict
from functools import lru_cache

from proxy.routing.blocks import EDGES

Path = list[tuple["Node", int]]
"""From the root down: runs and how many of their blocks matched; only the last can be partial."""


class Node:
    """A run of blocks. `start` is the number of blocks before it.

    `ended` says that some request's prompt or answer ended at the end of this run: what continues it is a further turn
    of that conversation, where a run that only branches is something that different prompts share.
    """

    __slots__ = ("asked", "blocks", "children", "mask", "parent", "prompts", "start", "tokens_per_byte")

    def __init__(self, parent: "Node | None", start: int, blocks: "array[int]", tokens_per_byte: float) -> None:
        self.parent = parent
        self.start = start
        self.blocks = blocks
        self.tokens_per_byte = tokens_per_byte
        self.children: dict[int, Node] | None = None
        self.mask = 0
        self.asked = 0
        self.prompts = 0

    @property
    def ended(self) -> bool:
        return self.asked > 0

    def tokens(self, covered: int) -> float:
        """Tokens in the first `covered` blocks of this run; of an output without hashes, all of it."""
        if not self.blocks:
            return self.tokens_per_byte
        return (EDGES[self.start + covered] - EDGES[self.start]) * self.tokens_per_byte


class Held:
    """What one replica holds: runs in the order of their use, each with the blocks covered and its last use.

    Time is measured in uses (`ticks`), not seconds.
    """

    __slots__ = ("capacity", "lru", "ticks", "tokens")

    def __init__(self, capacity: float, ticks: int = 0) -> None:
        self.lru: OrderedDict[Node, tuple[int, int]] = OrderedDict()
        self.capacity = capacity
        self.tokens = 0.0
        self.ticks = ticks


@lru_cache(maxsize=4096)
def bits(mask: int) -> tuple[int, ...]:
    """The positions of the bits that are set; the sets of replicas that hold something come again and again."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)
