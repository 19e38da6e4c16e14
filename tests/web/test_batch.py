from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.request import parse
from proxy.web.batch import Places, read
from tests.web.batches import divisions, dumps


def body(**fields: Any) -> bytes:
    return dumps({"model": "m", "prompt": ["a", "b", "c"], **fields})


def test_parts_have_their_prompts_and_everything_else() -> None:
    text = b'{"model": "m", "temperature" : 1.0,"prompt": [[1, 2], [3,4 ],\n[5]], "seed": 7e0, "odd": {"a": [1.50]}}'
    batch = read(text)
    assert batch is not None
    assert batch.body([0, 2]) == (
        b'{"model":"m","temperature":1.0,"prompt":[[1, 2],[5]],"seed":7e0,"odd":{"a": [1.50]}}'
    )
    assert batch.n == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "a"},
        {"prompt": [1, 2, 3], "n": 0},
        {"prompt": ["a"]},
        {"prompt": []},
        {"prompt": None},
        {"n": 0},
        {"n": -1},
        {"n": None},
        {"n": "2"},
        {"n": 2.5},
        {"n": True},
        {"n": 10**30},
        {"stream": 1},
        {"stream": "true"},
        {"prompt_embeds": "AAAA"},
        {"prompt_embeds": []},
        {"kv_transfer_params": {"remote_block_ids": [1]}},
        {"ec_transfer_params": {}},
        {"use_beam_search": True},
    ],
)
def test_what_stays_whole(fields: dict[str, Any]) -> None:
    assert read(body(**fields)) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"prompt": ["a", "b"',
        b'{"prompt": ["a", "b"], "x": NaN}',
        '{"prompt": ["a", "b"]}'.encode("utf-16"),
        b'{"prompt": ["a", "b"], "\\ud800": 1}',
        b'{"prompt": ["a", "b"], "deep": ' + b"[" * 100_000,
    ],
)
def test_what_cannot_be_read_stays_whole(text: bytes) -> None:
    assert read(text) is None


@pytest.mark.parametrize(
    "fields", [{"n": 3}, {"stream": None}, {"stream": False}, {"stream": True}, {"prompt_embeds": None}, {"n": 10**6}]
)
def test_what_is_divided(fields: dict[str, Any]) -> None:
    batch = read(body(**fields))
    assert batch is not None
    assert batch.n == fields.get("n", 1)


def test_the_last_of_two_keys_counts_as_for_the_engine() -> None:
    batch = read(b'{"prompt": ["a", "b"], "n": 2, "prompt": ["c", "d", "e"], "n": 3}')
    assert batch is not None
    assert (json.loads(batch.body([2])), batch.n) == ({"prompt": ["e"], "n": 3}, 3)


prompts = st.lists(st.text(min_size=1), min_size=2, max_size=6) | st.lists(
    st.lists(st.integers(0, 2**31), min_size=1, max_size=5), min_size=2, max_size=6
)


@settings(deadline=None)
@given(prompts, st.data())
def test_routing_and_parts_read_the_same_prompts(asked: list[Any], data: st.DataObject) -> None:
    indent = data.draw(st.sampled_from([None, 1]))
    text = json.dumps({"model": "m", "prompt": asked}, indent=indent).encode()
    batch, routed = read(text), parse("/v1/completions", text)
    assert batch is not None
    assert len(batch.prompts) == len(routed.prompts) == len(asked)
    positions = data.draw(st.lists(st.sampled_from(range(len(asked))), unique=True, min_size=1))
    part = batch.body(positions)
    assert json.loads(part)["prompt"] == [asked[position] for position in positions]
    assert parse("/v1/completions", part).prompts == tuple(routed.prompts[position] for position in positions)


@settings(deadline=None)
@given(divisions())
def test_places_are_a_permutation(division: tuple[int, int, list[list[int]]]) -> None:
    count, n, parts = division
    places = [Places(part, n) for part in parts]
    assert sorted(each.of(index) for each in places for index in range(len(each))) == list(range(count * n))


@pytest.mark.parametrize("index", [-1, 4, 10**9])
def test_a_place_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError):
        Places([1, 5], 2).of(index)
