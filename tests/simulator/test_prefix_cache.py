from proxy.simulator.prefix_cache import Block, BlockPool, chain_hashes, chain_seed, kv_name
from proxy.simulator.weights import mixed_weights

TOKENS = list(range(100, 164))


def test_hashes_are_chained_and_seeded() -> None:
    base = chain_hashes(chain_seed(None, None), TOKENS, 16)
    assert len(base) == 4 and len(set(base)) == 4
    assert chain_hashes(chain_seed(None, None), TOKENS[:40], 16) == base[:2]
    assert chain_hashes(base[1], TOKENS[32:], 16) == base[2:]
    changed = chain_hashes(chain_seed(None, None), [1, *TOKENS[1:]], 16)
    assert not set(changed) & set(base)
    seeds = [chain_seed(*pair) for pair in (("a", None), (None, "a"), ("a", "s"), (None, None))]
    assert len(set(seeds)) == 4


def test_a_block_names_what_it_holds() -> None:
    fresh = Block(b"1", "new", kv_name("new", None))
    assert fresh.kv == "new"
    stale = Block(b"1", "old", "old")
    above = Block(b"2", "new", kv_name("new", stale))
    assert above.kv == mixed_weights("new", "old")
    # However many blocks the new weights add, it is the same mixture.
    assert kv_name("new", above) == above.kv
    assert kv_name("third", above) == mixed_weights("third", above.kv)


def fill(pool: BlockPool, hashes: list[bytes], weights: str = "w") -> list[Block]:
    pool.take(len(hashes))
    blocks: list[Block] = []
    for block_hash in hashes:
        blocks.append(pool.store(block_hash, weights, blocks[-1] if blocks else None))
    return blocks


def test_freed_blocks_stay_hittable_until_they_are_needed() -> None:
    pool = BlockPool(4)
    blocks = fill(pool, [b"a", b"b", b"c"])
    assert (pool.available, pool.used, pool.cached) == (1, 3, 3)
    pool.release(blocks, 0)
    assert (pool.available, pool.used) == (4, 0)
    assert pool.longest_hit([b"a", b"b", b"x", b"c"]) == blocks[:2]
    pool.take(2)
    # The blank one first, then the tail of what was freed.
    assert (pool.evictions, pool.longest_hit([b"a", b"b", b"c"])) == (1, blocks[:2])


def test_held_blocks_are_not_evicted() -> None:
    pool = BlockPool(3)
    blocks = fill(pool, [b"a", b"b"])
    pool.release(blocks, 0)
    pool.hold(blocks[:1])
    assert (pool.available, pool.free_among(blocks)) == (2, 1)
    pool.take(2)
    assert (pool.longest_hit([b"a"]), pool.longest_hit([b"b"])) == (blocks[:1], [])


def test_shared_blocks_are_freed_by_the_last() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, [b"a"])
    pool.hold(blocks)
    pool.release(blocks, 0)
    assert pool.used == 1
    pool.take(1)
    assert pool.available == 0
    pool.release(blocks, 1)
    assert (pool.used, pool.available) == (0, 2)


def test_equal_blocks_are_not_merged() -> None:
    pool = BlockPool(2)
    one, two = fill(pool, [b"a"]), fill(pool, [b"a"])
    assert (pool.used, pool.cached, pool.longest_hit([b"a"])) == (2, 1, one)
    pool.release(one, 0)
    pool.release(two, 0)
    pool.take(1)
    assert pool.longest_hit([b"a"]) == two
    pool.take(1)
    assert (pool.longest_hit([b"a"]), pool.evictions) == ([], 2)


def test_reset_only_at_rest() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, [b"a"])
    assert not pool.reset()
    assert pool.longest_hit([b"a"]) == blocks
    pool.release(blocks, 0)
    assert pool.reset()
    assert (pool.longest_hit([b"a"]), pool.blank, pool.cached) == ([], 2, 0)
