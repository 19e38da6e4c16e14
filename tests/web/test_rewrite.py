from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.web.rewrite import GiveBack, model_in, with_model


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "a"}', "a"),
        (b'{"x": {"model": "b"}, "model": "a"}', "a"),
        (b'{"model": "b", "model": "a"}', "a"),
        (b'{"model": "a", "x": NaN}', "a"),
        ('{"model": "ä"}'.encode("utf-16"), "ä"),
        (b'\xef\xbb\xbf{"model": "a"}', "a"),
        (b'{"model": ""}', None),
        (b'{"model": null}', None),
        (b'{"model": ["a"]}', None),
        (b'{"model": ["a"], "x": NaN}', None),
        (b'["model"]', None),
        (b"{", None),
        (b"", None),
        (b"\xff\xfe\x00", None),
        (b"[" * 100_000, None),
        (b'{"model": "a"} x', None),
    ],
)
def test_model_in(body: bytes, model: str | None) -> None:
    assert model_in(body) == model


def test_with_model_keeps_every_other_byte_of_the_values() -> None:
    body = b'{"a": 1.50, "model":"x", "prompt":[1,  2], "seed": 12345678901234567890123}'
    assert with_model(body, "n") == b'{"a":1.50,"model":"n","prompt":[1,  2],"seed":12345678901234567890123}'


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff"])
def test_with_model_leaves_alone_what_is_no_object(body: bytes) -> None:
    assert with_model(body, "n") == body


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.sampled_from(["utf-8", "utf-16", "utf-32"]))
def test_with_model_means_the_same_for_the_engine(fields: dict[str, object], encoding: str) -> None:
    body = json.dumps({**fields, "model": "v1"}, ensure_ascii=False).encode(encoding, "surrogatepass")
    try:
        was = json.loads(body)
    except ValueError:
        return
    assert model_in(body) == "v1"
    assert repr(json.loads(with_model(body, "v1@x"))) == repr({**was, "model": "v1@x"})


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(edges)]


TEXT = b'"the \\"model\\":\\"v1@bbbb\\" says"'
ANSWER = b'data: {"id":"1","model":"v1@bbbb","text":%b}\n\ndata: {"model": "v1@bbbb"}\n\n' % TEXT
GIVEN = b'data: {"id":"1","model":"v1","text":%b}\n\ndata: {"model": "v1"}\n\n' % TEXT


@given(st.lists(st.integers(0, 500), max_size=12))
def test_the_name_is_given_back_wherever_the_chunks_end(at: list[int]) -> None:
    back = GiveBack("v1@bbbb", "v1", anywhere=False)
    assert b"".join(map(back.feed, cut(ANSWER, at))) + back.rest() == GIVEN
    assert back.rest() == b""


@given(st.lists(st.integers(0, 500), max_size=12))
def test_in_an_error_it_is_given_back_everywhere(at: list[int]) -> None:
    back = GiveBack("v1@bbbb", "v1", anywhere=True)
    message = b'{"error":{"message":"`v1@bbbb` is not v1@bbbc, v1@bbbb"}}'
    expected = b'{"error":{"message":"`v1` is not v1@bbbc, v1"}}'
    assert b"".join(map(back.feed, cut(message, at))) + back.rest() == expected


def test_no_event_is_held_back() -> None:
    back = GiveBack("v1@bbbb", "v1", anywhere=False)
    assert back.feed(b'data: {"model":"v1@bbbb"}\n\n') == b'data: {"model":"v1"}\n\n'
    assert back.feed(b'data: {"mod') == b"data: {"
    assert back.feed(b'e":1}') == b'"mode":1}'
