"""The ring: the same for everybody, and stable when replicas come and go."""

import random

from proxy.routing.ring import Ring

KEYS = {slot: f"http://10.0.0.{slot}:8000" for slot in range(8)}


def first(ring: Ring, key: int) -> int:
    return next(ring.walk(key))


def keys(count: int) -> list[int]:
    draw = random.Random(4)
    return [draw.getrandbits(64) for _ in range(count)]


def test_every_replica_comes_once() -> None:
    ring = Ring(KEYS)
    for key in keys(50):
        assert sorted(ring.walk(key)) == sorted(KEYS)


def test_slots_do_not_matter_only_keys_do() -> None:
    turned = {7 - slot: key for slot, key in KEYS.items()}
    one, other = Ring(KEYS), Ring(turned)
    for key in keys(200):
        assert KEYS[first(one, key)] == turned[first(other, key)]


def test_a_replica_that_leaves_moves_only_what_it_had() -> None:
    before, after = Ring(KEYS), Ring({slot: key for slot, key in KEYS.items() if slot != 3})
    for key in keys(500):
        if first(before, key) != 3:
            assert first(after, key) == first(before, key)


def test_shares_are_roughly_even() -> None:
    ring = Ring(KEYS)
    counts = [0] * len(KEYS)
    for key in keys(8000):
        counts[first(ring, key)] += 1
    assert max(counts) < 1.6 * 1000 and min(counts) > 0.5 * 1000


def test_an_empty_ring() -> None:
    assert list(Ring({}).walk(5)) == []
