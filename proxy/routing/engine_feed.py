"""What an engine says of its own prefix cache, entered into the index. Pure.

An engine names a block by a hash of its own and says which block it follows, so the tokens from a prompt's beginning to
any block are known here, and with them the place in the index. Where a replica speaks, the index need not guess what it
has evicted. The events speak of token ids: prompts of text and chat are not found by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.routing import blocks as hashing
from proxy.routing.index import Index
from proxy.routing.prompt import Kind

BlockHash = bytes | int


@dataclass(slots=True, frozen=True)
class EngineBlock:
    """One block in an engine: `data` are its token ids in canonical bytes, from byte `start` of the prompt."""

    parent: EngineBlock | None
    data: bytes
    start: int
    model: str
    seed: int

    def prefix(self) -> bytes:
        """Everything from the prompt's beginning to this block's end."""
        pieces: list[bytes] = []
        block: EngineBlock | None = self
        while block is not None:
            pieces.append(block.data)
            block = block.parent
        return b"".join(reversed(pieces))


class EngineFeed:
    """The blocks of every engine that speaks. `slot_of` gives the index's slot of a replica, None when it has none."""

    def __init__(self, index: Index, slot_of: Callable[[int], int | None]) -> None:
        self._index = index
        self._slot_of = slot_of
        self._blocks: dict[int, dict[BlockHash, EngineBlock]] = {}

    def stored(
        self,
        replica: int,
        model: str,
        salt: str,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        token_ids: Sequence[int],
        block_size: int,
    ) -> None:
        """The engine holds these blocks now, one after the other. Without a known parent they have no place here."""
        known = self._blocks.setdefault(replica, {})
        before = known.get(parent) if parent is not None else None
        slot = self._slot_of(replica)
        if slot is None or block_size < 1 or (parent is not None and before is None):
            return
        seed = before.seed if before is not None else hashing.seed(model, salt, Kind.TOKENS)
        model = before.model if before is not None else model
        for at, block_hash in enumerate(hashes):
            data = hashing.canonical_ids(token_ids[at * block_size : (at + 1) * block_size])
            start = before.start + len(before.data) if before is not None else 0
            before = known[block_hash] = EngineBlock(before, data, start, model, seed)
        if before is None or not hashes:
            return
        prefix = before.prefix()
        chain: list[int] = []
        hashing.extend(chain, 0, prefix, seed)
        path = self._index.walk(seed, chain)
        tokens_per_byte = len(token_ids) / max(1, len(before.data) * len(hashes))
        self._index.record(model, seed, chain, tokens_per_byte, slot, path)

    def removed(self, replica: int, hashes: Sequence[BlockHash]) -> None:
        """The engine has evicted these blocks; what follows them can no longer be reached either."""
        known = self._blocks.get(replica, {})
        slot = self._slot_of(replica)
        for block_hash in hashes:
            block = known.pop(block_hash, None)
            if block is None or slot is None:
                continue
            chain: list[int] = []
            hashing.extend(chain, 0, block.prefix(), block.seed)
            keep = hashing.block_count(block.start)
            self._index.remove(slot, self._index.walk(block.seed, chain), keep)

    def cleared(self, replica: int) -> None:
        """The engine's cache is empty, or events were missed and nothing is sure any more."""
        self._blocks.pop(replica, None)
        slot = self._slot_of(replica)
        if slot is not None:
            self._index.forget(slot)

    def count(self, replica: int) -> int:
        """Blocks that the engine is known to hold."""
        return len(self._blocks.get(replica, ()))
