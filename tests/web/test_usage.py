from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.lease import Usage
from proxy.web.usage import NOTHING, SCAN_FROM, Learned, of_answer, of_stream, read
from proxy.web.usage_scan import scan

COMPLETION = {
    "id": "cmpl-1",
    "model": "base",
    "choices": [{"index": 0, "text": "x", "logprobs": {"tokens": ["]"]}, "token_ids": [1, 2], "prompt_token_ids": [3]}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
    "kv_transfer_params": None,
}


def dumped(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("size", [0, SCAN_FROM], ids=["decoded", "searched"])
def test_a_completion(size: int) -> None:
    text = '"usage":{"prompt_tokens":1} "token_ids":[5' * (1 + size // 40)
    choice = {**COMPLETION["choices"][0], "text": text}  # type: ignore[index]
    body = dumped({**COMPLETION, "choices": [choice]})
    assert (len(body) >= SCAN_FROM) == bool(size)
    learned = of_answer(body)
    assert learned == Learned(Usage(9, 8, 2, b"[1,2]"), "cmpl-1")


@pytest.mark.parametrize("size", [0, SCAN_FROM], ids=["decoded", "searched"])
def test_a_completion_that_says_less(size: int) -> None:
    answer = {
        "id": "c",
        "choices": [{"text": "x" * size}],
        "usage": {"prompt_tokens": 9, "prompt_tokens_details": None},
    }
    assert of_answer(dumped(answer)) == Learned(Usage(9), "c")
    assert of_answer(dumped({"text": "x" * size})) == NOTHING
    assert of_answer(dumped({"text": "x" * size, "usage": None})) == NOTHING


def test_several_choices_have_no_one_output() -> None:
    answer = {**COMPLETION, "choices": [{"token_ids": [1]}, {"token_ids": [2]}]}
    usage = of_answer(dumped(answer)).usage
    assert usage is not None and usage.output_ids is None


def test_token_ids_may_be_null() -> None:
    usage = of_answer(dumped({**COMPLETION, "choices": [{"token_ids": None}]})).usage
    assert usage is not None and usage.output_ids is None


def test_responses_and_messages() -> None:
    said = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}
    assert of_answer(dumped({"id": "resp_1", "usage": said})).usage == Usage(9, 8, 2)
    said = {"input_tokens": 9, "output_tokens": 2, "cache_read_input_tokens": 8}  # type: ignore[dict-item]
    assert of_answer(dumped({"id": "msg_1", "usage": said})).usage == Usage(9, 8, 2)


def test_a_stream() -> None:
    usage = COMPLETION["usage"]
    stream = b'data: {"id":"c","choices":[{"text":"\\"usage\\":{"}]}\n\ndata: %b\n\ndata: [DONE]\n\n'
    assert of_stream(stream % dumped({"id": "c", "choices": [], "usage": usage})) == Learned(Usage(9, 8, 2), "c")
    assert of_stream(stream % b'{"usage":null}') == Learned(None, "c")
    assert of_stream(stream % b'{"usage":broken') == Learned(None, "c")
    assert of_stream(b'data: {"usage":null}\n\ndata: [DONE]\n\n') == NOTHING
    assert of_stream(b'"usage":{"prompt_tokens":1}') == NOTHING
    event = {"type": "response.completed", "response": {"id": "r", "usage": {"input_tokens": 3}}}
    assert of_stream(b"event: response.completed\n" + stream % dumped(event)) == Learned(Usage(3), "r")


def test_the_last_event_that_has_some_counts() -> None:
    events = [b'data: {"usage":{"completion_tokens":%d}}\n\n' % count for count in (1, 2)]
    found = of_stream(b"".join((*events, b'data: {"usage":null}\n\n'))).usage
    assert found is not None and found.output_tokens == 2


def test_read_goes_by_the_media_type() -> None:
    body = dumped(COMPLETION)
    pieces = [body[:10], body[10:30], body[30:]]
    assert read(b"application/json; charset=utf-8", pieces) == of_answer(body)
    assert read(b"text/html", pieces) == NOTHING
    stream = b"data: " + dumped({"usage": {"prompt_tokens": 1}}) + b"\n\n"
    assert read(b"text/event-stream; charset=utf-8", [stream[:9], stream[9:]]).usage == Usage(1)


@given(st.binary(max_size=60), st.booleans())
def test_nothing_raises(garbage: bytes, large: bool) -> None:
    body = garbage + b'"usage":{' + garbage + (b" " * SCAN_FROM if large else b"")
    read(b"application/json", [body])
    read(b"text/event-stream", [b"data:" + body])


@given(st.lists(st.integers(1, 400), max_size=60), st.integers(0, 3))
def test_a_large_answer_is_read_in_any_chunks(sizes: list[int], layout: int) -> None:
    choice = dict(COMPLETION["choices"][0])  # type: ignore[call-overload]
    lists = {"logprobs": {"top_logprobs": [[n] for n in range(20 * layout)]}, "text": ' "token_ids":[' * layout}
    choice = {**lists, **choice, **lists} if layout % 2 else {**choice, **lists}
    body = dumped({**COMPLETION, "choices": [choice]})
    pieces, at = [], 0
    for size in sizes:
        if at < len(body):
            pieces.append(body[at : at + size])
            at += size
    if at < len(body):
        pieces.append(body[at:])
    found = scan(pieces)
    assert found.token_ids == b"[1,2]"
    assert found.response_id == "cmpl-1"
    assert found.usage is not None and json.loads(found.usage) == COMPLETION["usage"]
