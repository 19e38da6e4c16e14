from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from proxy.errors import Unmergeable
from proxy.web.batch import Places
from proxy.web.batch_merge import PartAnswer, merge
from tests.web.batches import answer, divisions, dumps, texts


@settings(deadline=None)
@given(divisions(), texts)
def test_parts_merged_are_the_answer_of_one_server(division: tuple[int, int, list[list[int]]], text: str) -> None:
    count, n, parts = division
    answers = [
        PartAnswer(
            answer(positions, n, text, name=f"cmpl-{min(positions)}", created=min(positions)), Places(positions, n)
        )
        for positions in parts
    ]
    assert merge(answers) == answer(range(count), n, text, name="cmpl-0", created=0)


def test_values_keep_their_bytes() -> None:
    first = b'{ "choices": [ {"text":"\\u0041", "index": 0, "x": 1.50} ], "usage":{"prompt_tokens":1}, "odd":  [ 1e3 ]}'
    second = b'{"choices":[{"index":0,"x":-0.0}],"usage":{"prompt_tokens":2},"odd":[2]}'
    merged = merge([PartAnswer(second, Places([1], 1)), PartAnswer(first, Places([0], 1))])
    assert merged == (
        b'{"choices":[{"text":"\\u0041","index":0,"x":1.50},{"index":1,"x":-0.0}],"usage":{"prompt_tokens":3},'
        b'"odd":[ 1e3 ]}'
    )


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        (None, None, None),
        ({"prompt_tokens": 1}, None, None),
        (None, {"prompt_tokens": 1}, {"prompt_tokens": 1}),
        (
            {"prompt_tokens": 1},
            {"prompt_tokens": 2, "completion_tokens": None},
            {"prompt_tokens": 3, "completion_tokens": None},
        ),
        ({"a": True, "b": 1}, {"a": True, "b": 1.5}, {"a": True, "b": 1.5}),
        ({"details": {"cached_tokens": 3}}, {"details": {"cached_tokens": 4}}, {"details": {"cached_tokens": 4}}),
        (7, "x", "x"),
    ],
)
def test_usage(first: Any, second: Any, whole: Any) -> None:
    parts = [
        PartAnswer(dumps({"choices": [{"index": 0}], "usage": usage}), Places([at], 1))
        for at, usage in enumerate((first, second))
    ]
    assert json.loads(merge(parts))["usage"] == whole


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"null",
        b"{}",
        b'{"choices":null}',
        b'{"choices":{}}',
        b'{"choices":[1,2]}',
        b'{"choices":[{"index":0}]}',
        b'{"choices":[{"index":0},{"index":0}]}',
        b'{"choices":[{"index":0},{"index":2}]}',
        b'{"choices":[{"index":0},{"index":-1}]}',
        b'{"choices":[{"index":0},{"index":"1"}]}',
        b'{"choices":[{"index":0},{"index":99999999999999999999999}]}',
        b'{"choices":[{"index":0},{"index":1},{"index":2}]}',
        b'{"choices":[{"index":0},{"text":"a"}]}',
        b'{"choices":' + b"[" * 100_000,
    ],
)
def test_what_does_not_answer_two_prompts(body: bytes) -> None:
    with pytest.raises(Unmergeable):
        PartAnswer(body, Places([4, 5], 1))
