"""Chains: pinned values, prefixes, growth."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.blocks import EDGES, block_count, canonical_ids, chain, seed
from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import parse


def tokens(ids: list[int]) -> Prompt:
    return parse("/v1/completions", json.dumps({"prompt": ids}).encode()).prompts[0]


def test_pinned_values() -> None:
    """Two proxies, whatever their version of xxhash, must hash alike."""
    assert seed("", "", Kind.TOKENS) == 0x7DDCDE1352A18EB2
    assert seed("trl-policy-v1", "salt", Kind.CHAT) == 0x3E1CBC35252F2CC5
    found = chain(tokens(list(range(1000, 1040))), seed("m", "", Kind.TOKENS), 0.25)
    assert found.blocks == [0xA3014027AB719E11, 0xC405A586B0B7024B]


def test_edges_grow_and_cover_sixteen_megabytes() -> None:
    steps = [b - a for a, b in zip(EDGES, list(EDGES)[1:], strict=False)]
    assert steps == sorted(steps) and EDGES[0] == 0 and EDGES[-1] == 16 * 1024 * 1024
    assert len(EDGES) < 4096


@settings(deadline=None)
@given(st.integers(0, 20_000_000))
def test_block_count_is_the_number_of_full_blocks(size: int) -> None:
    count = block_count(size)
    assert EDGES[count] <= size and (count + 1 == len(EDGES) or EDGES[count + 1] > size)


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=120), st.lists(st.integers(0, 200_000), max_size=120))
def test_chains_agree_exactly_as_far_as_their_prompts(one: list[int], other: list[int]) -> None:
    begin = seed("m", "", Kind.TOKENS)
    a, b = chain(tokens([7, *one]), begin, 0.25), chain(tokens([7, *other]), begin, 0.25)
    x, y = canonical_ids([7, *one]), canonical_ids([7, *other])
    shared = next((at for at, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    equal = block_count(shared)
    assert a.blocks[:equal] == b.blocks[:equal]
    assert not set(a.blocks[equal:]) & set(b.blocks[equal:])


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=200), st.lists(st.integers(0, 200_000), max_size=200))
def test_a_continued_chain_is_the_chain_of_the_longer_prompt(first: list[int], more: list[int]) -> None:
    begin = seed("m", "", Kind.TOKENS)
    continued = chain(tokens(first), begin, 0.25).continued(canonical_ids(more))
    whole = chain(tokens(first + more), begin, 0.25)
    assert (continued.blocks, continued.tail, continued.size) == (whole.blocks, whole.tail, whole.size)


def test_continuing_across_the_strides() -> None:
    begin = seed("m", "", Kind.TOKENS)
    first, more = [123456] * 1700, [654321] * 7000
    continued = chain(tokens(first), begin, 0.25).continued(canonical_ids(more))
    assert continued.blocks == chain(tokens(first + more), begin, 0.25).blocks


def test_what_seeds_the_engine_seeds_the_chain() -> None:
    seeds = {seed(m, s, k) for m in ("", "a", "b", "ab") for s in ("", "a", "b", "ba") for k in Kind}
    assert len(seeds) == 4 * 4 * 3


def test_tokens_are_counted() -> None:
    exact = chain(tokens(list(range(600))), 1, 0.25)
    assert exact.tokens == 600
    estimated = chain(tokens([123_456] * 50_000), 1, 0.25)
    assert abs(estimated.tokens - 50_000) < 500
    text = chain(Prompt(Kind.TEXT, b"x" * 400), 1, 0.25)
    assert text.tokens == 100


def test_canonical_ids() -> None:
    assert canonical_ids([1, 2]) == canonical_ids(b"[1, 2]") == canonical_ids(b"1,2") == b"1,2,"
    assert canonical_ids([]) == canonical_ids(b"[]") == b""


def test_a_million_tokens_have_few_blocks() -> None:
    body = b'{"prompt": [' + b", ".join([b"123456"] * 1_000_000) + b"]}"
    found = chain(parse("/v1/completions", body).prompts[0], 1, 0.25)
    assert 500 < len(found.blocks) < 2000
