"""Consistent hashing: where a prompt that nobody holds belongs, the same for every proxy with the same replicas.

Rendezvous weights would need a hash for each replica and prompt; a ring needs one search. Each replica owns `POINTS`
points derived from its key (its URL), so adding or removing one moves only what falls to it.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

POINTS: Final = 64


class Ring:
    """An unchanging ring over `{slot: key}`."""

    def __init__(self, keys: dict[int, str]) -> None:
        points = sorted(
            (xxh3_64_intdigest(f"{number}\x00{key}".encode()), key, slot)
            for slot, key in keys.items()
            for number in range(POINTS)
        )
        self._hashes = [point[0] for point in points]
        self._slots = [point[2] for point in points]
        self._size = len(keys)

    def walk(self, key: int) -> Iterator[int]:
        """All slots, each once, in the order in which this key prefers them."""
        slots = self._slots
        count = len(slots)
        at = bisect_left(self._hashes, key)
        seen: set[int] = set()
        for step in range(count):
            slot = slots[(at + step) % count]
            if slot not in seen:
                seen.add(slot)
                yield slot
                if len(seen) == self._size:
                    return
