"""KV blocks: a pool with chained hashes, reference counts and an LRU free list.

Follows ``vllm/v1/core/block_pool.py``: freed blocks stay hittable until they are needed for something else; blocks
without a hash are reused first; equal blocks that were computed side by side are not merged.

A block remembers whose weights computed it, which a real engine does not: that is how a stale block becomes visible in
the output (see ``weights.mixed_weights``).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from xxhash import xxh3_128_digest

from proxy.simulator.weights import mixed_weights


@dataclass(slots=True, eq=False)
class Block:
    """A full block: ``weights`` computed it, ``kv`` names what it holds (other than ``weights`` on a stale prefix)."""

    hash: bytes
    weights: str
    kv: str
    refs: int = 1


def chain_seed(adapter: str | None, cache_salt: str | None) -> bytes:
    """What stands in front of the first block: the adapter's *name*, not its weights, and the salt, as in vLLM."""
    return xxh3_128_digest(f"{adapter or ''}\0{cache_salt or ''}".encode())


def chain_hashes(parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``tokens`` that follow the block ``parent``."""
    raw = memoryview(array("I", tokens).tobytes())
    width = 4 * block_size
    hashes = []
    for start in range(0, len(raw) - width + 1, width):
        parent = xxh3_128_digest(parent + raw[start : start + width])
        hashes.append(parent)
    return hashes


def kv_name(weights: str, parent: Block | None) -> str:
    """What a block (or a tail) holds that ``weights`` compute after ``parent``."""
    if parent is None or parent.kv == weights:
        return weights
    return parent.kv if parent.weights == weights else mixed_weights(weights, parent.kv)


@dataclass(slots=True)
class BlockPool:
    """``capacity`` blocks, each blank, cached and held, or cached and free."""

    capacity: int
    blank: int = 0
    evictions: int = 0
    _cached: dict[bytes, list[Block]] = field(default_factory=dict)
    _free: OrderedDict[Block, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.blank = self.capacity

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return self.blank + len(self._free)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.capacity - self.available

    @property
    def cached(self) -> int:
        """Distinct hashes that would hit."""
        return len(self._cached)

    def longest_hit(self, hashes: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest cached prefix of ``hashes``; nothing is taken."""
        hit = []
        for block_hash in hashes:
            blocks = self._cached.get(block_hash)
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def free_among(self, blocks: Sequence[Block]) -> int:
        """How many of ``blocks`` are on the free list (holding them makes as many unavailable)."""
        return sum(1 for block in blocks if not block.refs)

    def hold(self, blocks: Sequence[Block]) -> None:
        """One more reference to each."""
        for block in blocks:
            if not block.refs:
                del self._free[block]
            block.refs += 1

    def take(self, count: int) -> None:
        """``count`` blanks for a request, evicting the least recently used; the caller checked ``available``."""
        self.blank -= count
        while self.blank < 0:
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self.evictions += 1
            self.blank += 1

    def store(self, block_hash: bytes, weights: str, parent: Block | None) -> Block:
        """Turn one blank that the caller took into a cached block, held by the caller."""
        block = Block(block_hash, weights, kv_name(weights, parent))
        self._cached.setdefault(block_hash, []).append(block)
        return block

    def release(self, blocks: Sequence[Block], blanks: int) -> None:
        """Give back a request's blocks: the tail is evicted before the head."""
        self.blank += blanks
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                self._free[block] = None

    def reset(self) -> bool:
        """Forget every hash; False, and nothing happens, while anybody holds a block."""
        if self.used:
            return False
        self._cached.clear()
        self._free.clear()
        self.blank = self.capacity
        return True

    def _forget(self, block: Block) -> None:
        twins = self._cached[block.hash]
        twins.remove(block)
        if not twins:
            del self._cached[block.hash]
