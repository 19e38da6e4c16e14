"""The tree of runs, its bounds, and what replicas hold."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.blocks import EDGES
from proxy.routing.index import Index
from proxy.routing.runs import bits

TPB = 0.25


def hold(index: Index, blocks: list[int], slot: int, seed: int = 1, model: str = "m") -> None:
    index.record(model, seed, blocks, TPB, slot, index.walk(seed, blocks))


def depth(index: Index, blocks: list[int], slot: int, seed: int = 1) -> int:
    return index.depth(index.walk(seed, blocks), slot)


def index_of(*slots: int, capacity: int | None = None) -> Index:
    index = Index()
    for slot in slots:
        index.set_capacity(slot, capacity)
    return index


def test_siblings_branches_and_strangers() -> None:
    index = index_of(0, 1)
    trunk, left, right = [1, 2, 3, 4], [1, 2, 3, 4, 10, 11], [1, 2, 3, 4, 20, 21, 22]
    hold(index, trunk, 0)
    hold(index, left, 0)
    hold(index, right, 1)
    assert [depth(index, left, slot) for slot in (0, 1)] == [6, 4]
    assert [depth(index, right, slot) for slot in (0, 1)] == [4, 7]
    assert [depth(index, [1, 2, 9], slot) for slot in (0, 1)] == [2, 2]
    assert depth(index, [9], 0) == 0
    assert index.blocks == 6 + 7


def test_seeds_share_nothing() -> None:
    index = index_of(0)
    hold(index, [1, 2], 0, seed=1)
    assert depth(index, [1, 2], 0, seed=2) == 0


def test_a_replica_that_restarts_holds_nothing_and_others_keep_theirs() -> None:
    index = index_of(0, 1)
    hold(index, [1, 2, 3], 0)
    hold(index, [1, 2, 4], 1)
    index.forget(0)
    assert (depth(index, [1, 2, 3], 0), depth(index, [1, 2, 3], 1)) == (0, 2)
    assert index.tokens(0) == 0.0
    index.forget(1)
    assert index.blocks == 0 and index.walk(1, [1, 2]) == [] and index.root(1) is None


def test_a_dropped_slot_can_be_used_again() -> None:
    index = index_of(0)
    hold(index, [1, 2], 0)
    index.drop(0)
    hold(index, [1, 2], 0)  # nobody is there
    assert index.blocks == 0
    index.set_capacity(0, None)
    assert depth(index, [1, 2], 0) == 0


def test_the_least_recently_used_end_goes_first() -> None:
    per_block = (EDGES[1] - EDGES[0]) * TPB
    index = index_of(0, capacity=int(per_block * 8))
    hold(index, [1, 2, 3, 4], 0)
    hold(index, [5, 6, 7, 8], 0)
    hold(index, [1, 2, 3, 4], 0)  # used again
    hold(index, [9, 10], 0)
    assert depth(index, [1, 2, 3, 4], 0) == 4
    assert depth(index, [5, 6, 7, 8], 0) == 2  # cut from its end
    assert depth(index, [9, 10], 0) == 2


def test_outputs_that_were_not_seen_take_room() -> None:
    index = index_of(0, capacity=1000)
    hold(index, [1, 2, 3], 0)
    index.occupy(0, 990)
    assert depth(index, [1, 2, 3], 0) < 3
    assert index.tokens(0) <= 1000


def test_an_unloaded_model_is_gone_but_still_takes_room() -> None:
    index = index_of(0)
    hold(index, [1, 2, 3], 0, seed=5, model="policy-v1")
    held = index.tokens(0)
    index.forget_model("policy-v1")
    assert depth(index, [1, 2, 3], 0, seed=5) == 0
    assert index.tokens(0) == held
    hold(index, [1, 2, 3], 0, seed=5, model="policy-v1")
    assert depth(index, [1, 2, 3], 0, seed=5) == 3


def test_removed_blocks_and_what_continues_them() -> None:
    index = index_of(0, 1)
    for slot in (0, 1):
        hold(index, [1, 2, 3, 4], slot)
        hold(index, [1, 2, 3, 4, 5, 6], slot)
    index.remove(0, index.walk(1, [1, 2, 3, 4, 5, 6]), 3)
    assert [depth(index, [1, 2, 3, 4, 5, 6], slot) for slot in (0, 1)] == [3, 6]
    index.remove(0, index.walk(1, [1, 2]), 0)
    assert depth(index, [1, 2, 3], 0) == 0


def test_what_is_older_than_something_evicted_is_evicted() -> None:
    index = index_of(0)
    hold(index, [1, 2], 0)
    hold(index, [3, 4], 0)
    tick = index.holding(index.walk(1, [3, 4]), 0)[1]
    hold(index, [5, 6], 0)
    index.forget_older(0, tick)
    assert [depth(index, blocks, 0) for blocks in ([1, 2], [3, 4], [5, 6])] == [0, 0, 2]


def test_new_prompts_are_counted_along_their_path() -> None:
    index = index_of(0)
    for last in (10, 20, 30):
        blocks = [1, 2, last]
        index.count_prompt(1, index.record("m", 1, blocks, TPB, 0, index.walk(1, blocks)))
    path = index.walk(1, [1, 2, 10])
    assert [node.prompts for node, _ in path] == [3, 1]
    root = index.root(1)
    assert root is not None and root.prompts == 3


@pytest.mark.parametrize("mask", [0, 1, 0b1011, 1 << 200])
def test_bits(mask: int) -> None:
    assert sum(1 << bit for bit in bits(mask)) == mask


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["hold", "hold", "hold", "occupy", "forget", "remove", "older", "capacity", "model"]),
        st.lists(st.integers(1, 3), min_size=1, max_size=8),
        st.integers(0, 2),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(STEPS)
def test_the_index_is_consistent_whatever_happens(steps: list[tuple[str, list[int], int]]) -> None:
    """Bounds hold, counts agree with the tree, and whoever holds a run holds what is before it."""
    index = index_of(0, 1, 2, capacity=int(EDGES[6] * TPB))
    for what, turns, slot in steps:
        blocks = [hash(tuple(turns[: at + 1])) & (2**64 - 1) for at in range(len(turns))]
        if what == "hold":
            hold(index, blocks, slot, model=f"m{turns[0]}", seed=turns[0])
        elif what == "occupy":
            index.occupy(slot, 10 * len(turns))
        elif what == "forget":
            index.forget(slot)
        elif what == "remove":
            index.remove(slot, index.walk(turns[0], blocks), len(turns) // 2)
        elif what == "older":
            index.forget_older(slot, index.ticks(slot) - len(turns))
        elif what == "capacity":
            index.set_capacity(slot, int(EDGES[len(turns)] * TPB) + 1)
        else:
            index.forget_model(f"m{turns[0]}")
        check(index)


def check(index: Index) -> None:
    held_blocks = 0
    for slot, held in index._held.items():
        assert held.tokens <= held.capacity + 1e-6
        assert abs(held.tokens - sum(node.tokens(covered) for node, (covered, _) in held.lru.items())) < 1e-6
        order = {node: at for at, node in enumerate(held.lru)}
        for node, (covered, _) in held.lru.items():
            held_blocks += covered
            if not node.blocks:
                continue
            assert node.mask >> slot & 1 and 0 < covered <= len(node.blocks)
            parent = node.parent
            if parent is not None and parent.blocks:
                assert parent.mask >> slot & 1
                assert held.lru[parent][0] == len(parent.blocks)
                assert order[parent] > order[node]
    assert index.blocks == held_blocks
    nodes, hashes = 0, 0
    todo = list(index._roots.values())
    while todo:
        node = todo.pop()
        for first, child in (node.children or {}).items():
            assert child.parent is node and child.blocks[0] == first and child.mask
            nodes += 1
            hashes += len(child.blocks)
            todo.append(child)
    assert set(index._names) == set(index._roots.values())


def test_a_million_blocks_take_less_than_a_hundred_bytes_each() -> None:
    """Estimated by the index itself; the estimate is held against the allocator in benchmarks/decide.py."""
    index = index_of(0)
    draw = random.Random(1)
    for _ in range(2000):
        hold(index, [1, 2, 3] + [draw.getrandbits(64) for _ in range(36)], 0)
    assert index.size() / index.blocks < 40
