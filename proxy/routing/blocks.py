"""Chained hashes of a prompt's blocks: equal chains mean equal prefixes.

A prompt is a stream of canonical bytes (`prompt.Prompt.canonical`) cut at fixed offsets, and each block's hash is
seeded with the hash before it, so that hash i stands for everything up to the end of block i. The first hash is seeded
with everything that seeds the engine's own: the upstream name of the model or adapter, the cache salt, and the kind.

Token ids are hashed as the digits they are written with, because finding every sixteenth token of a long list costs
twenty times as much as hashing its bytes. 96 bytes are 15 to 25 token ids (16 is the engine's usual block) or about 24
tokens of text; deeper in long prompts the blocks grow, which keeps a prompt of a million tokens at a few thousand
hashes. Outputs extend the stream of their prompt (`Tail`), and so can an engine's own cache events.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgspec
from xxhash import xxh3_64_intdigest

from proxy.routing.prompt import TOKENS, Kind, Prompt, without_space

# (bytes a block, bytes of the prompt up to which blocks are that long)
STRIDES: Final = ((96, 12 * 1024), (256, 32 * 1024), (1024, 256 * 1024), (8 * 1024, 16 * 1024 * 1024))


def _edges() -> "array[int]":
    edges = array("Q", [0])
    for size, limit in STRIDES:
        edges.extend(range(edges[-1] + size, limit + 1, size))
    return edges


EDGES: Final = _edges()
"""EDGES[i] is the number of bytes in the first i blocks; what lies beyond the last edge is not looked at."""

_FINE: Final = STRIDES[0][0]
_FINE_END: Final = STRIDES[0][1]
_REGIONS: Final = [
    (bisect_right(EDGES, limit) - 1, Struct(f"{size}s").iter_unpack)  # quicker than to slice
    for size, limit in STRIDES
]
"""(blocks up to the end of the stretch in which they are equally long, what cuts bytes into blocks of that length)"""
_SAMPLE: Final = 8192


def seed(model: str, salt: str, kind: Kind) -> int:
    """Where the chain of a prompt begins: prompts with different seeds share nothing."""
    return xxh3_64_intdigest(f"{kind.value}\x00{len(model)}\x00{model}\x00{salt}".encode(errors="surrogatepass"))


def block_count(size: int) -> int:
    """Full blocks in `size` bytes."""
    if size < _FINE_END:
        return size // _FINE
    return bisect_right(EDGES, size) - 1


def extend(chain: list[int], start: int, data: bytes, begin: int) -> None:
    """Append to `chain` the hashes of the full blocks of `data`, whose first byte is byte `start` of the stream.

    `start` must be EDGES[len(chain)]; `begin` seeds the first hash when the chain is still empty.
    """
    total = block_count(start + len(data))
    done = len(chain)
    h = chain[-1] if chain else begin
    append = chain.append
    digest = xxh3_64_intdigest
    view = memoryview(data)
    for end, blocks in _REGIONS:
        last = min(total, end)
        if done < last:
            for (block,) in blocks(view[EDGES[done] - start : EDGES[last] - start]):
                h = digest(block, h)
                append(h)
            done = last


class Chain(msgspec.Struct, frozen=True, gc=False):
    """The hashes of one prompt: `blocks[i]` stands for its first EDGES[i + 1] bytes.

    `tail` holds the bytes after the last full block, so that the chain can be extended by what is generated.
    `tokens` is the number of tokens where the prompt says it (token ids), else estimated by `tokens_per_byte`.
    """

    seed: int
    blocks: list[int]
    tail: bytes
    size: int
    tokens: int
    tokens_per_byte: float
    kind: Kind

    def continued(self, data: bytes) -> "Chain":
        """The chain of this prompt followed by `data`, canonical bytes of the same kind."""
        blocks = self.blocks.copy()
        rest = self.tail + data
        extend(blocks, self.size - len(self.tail), rest, self.seed)
        size = self.size + len(data)
        return Chain(
            self.seed,
            blocks,
            rest[len(rest) - (size - EDGES[len(blocks)]) :],
            size,
            self.tokens + round(len(data) * self.tokens_per_byte),
            self.tokens_per_byte,
            self.kind,
        )


def chain(prompt: Prompt, begin: int, tokens_per_byte: float) -> Chain:
    """Hash a prompt. `tokens_per_byte` is the estimate for text and chat; token ids are counted.

    Beyond 8 kB of token ids the count is an estimate from a sample (about 1 % off): exact costs more than the hashes.
    """
    data = prompt.canonical()
    size = len(data)
    blocks: list[int] = []
    extend(blocks, 0, data, begin)
    tail = data[EDGES[len(blocks)] :] if size <= EDGES[-1] else b""
    if prompt.kind is not TOKENS or not size:
        return Chain(begin, blocks, tail, size, round(size * tokens_per_byte), tokens_per_byte, prompt.kind)
    if size <= _SAMPLE:
        tokens = data.count(b",")
    else:
        half = _SAMPLE // 2
        sampled = data.count(b",", 0, half) + data.count(b",", size - half)
        tokens = round(sampled * size / _SAMPLE)
    return Chain(begin, blocks, tail, size, tokens, tokens / size, prompt.kind)


def canonical_ids(ids: Sequence[int] | bytes) -> bytes:
    """Token ids as canonical bytes: ints, or a JSON list as bytes (with or without its brackets)."""
    if isinstance(ids, bytes):
        inner = memoryview(ids)[1:-1] if ids[:1] == b"[" and ids[-1:] == b"]" else ids
        return without_space(inner)
    text = ",".join(map(str, ids))
    return text.encode() + b"," if text else b""
