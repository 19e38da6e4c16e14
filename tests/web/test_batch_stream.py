from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import Unmergeable, UpstreamError
from proxy.web import batch_stream
from proxy.web.batch import Places
from proxy.web.batch_stream import DONE, Common, Cutter, PartEvents, usage_event
from tests.web.batches import choice, divisions, dumps, texts, usage

FINGERPRINT = {"system_fingerprint": "vllm-0.27.1-1"}


def sse(value: Any) -> bytes:
    return b"data: %b\n\n" % dumps(value)


def events(prompts: Sequence[int], n: int, text: str, name: str, *, counted: bool, seed: int) -> list[bytes]:
    """One server's stream: the choices of `prompts` (numbers), three events each, in some order."""
    head = {"id": name, "object": "text_completion", "created": int(name[5:]), "model": "m"}
    queues = [(prompt, sample, at * n + sample, [0, 1, 2]) for at, prompt in enumerate(prompts) for sample in range(n)]
    order = random.Random(seed)
    made, first = [], None
    while queues:
        prompt, sample, index, steps = order.choice(queues)
        first = prompt if first is None else first
        step = steps.pop(0)
        one = {**choice(prompt, sample, index, text), "step": step}
        event = {**head, "choices": [one]}
        if counted:
            event["usage"] = {"prompt_tokens": prompt, "total_tokens": prompt + step, "completion_tokens": step}
        if not steps:
            queues.remove((prompt, sample, index, steps))
            if not counted:
                event |= FINGERPRINT
        made.append(sse(event))
    if counted:
        assert first is not None
        made.append(sse({**head, "choices": [], "usage": usage(prompts, n, first), **FINGERPRINT}))
    return [*made, DONE]


def parsed(stream: bytes) -> list[Any]:
    return [json.loads(event[6:]) if event != DONE[:-2] else "done" for event in stream.split(b"\n\n") if event]


def cut(data: bytes, seed: int) -> Iterable[bytes]:
    pieces = random.Random(seed)
    while data:
        size = pieces.choice([1, 2, 3, 50, 300, 4000])
        yield data[:size]
        data = data[size:]


@settings(deadline=None)
@given(divisions(), texts, st.booleans(), st.integers(0, 10**6))
def test_parts_woven_are_the_stream_of_one_server(
    division: tuple[int, int, list[list[int]]], text: str, counted: bool, seed: int
) -> None:
    count, n, positions = division
    common = Common()
    parts = [PartEvents(Places(part, n), common) for part in positions]
    names = [f"cmpl-{min(part)}" for part in positions]
    streams = [
        list(cut(b"".join(events(part, n, text, name, counted=counted, seed=seed)), seed))
        for part, name in zip(positions, names, strict=True)
    ]
    turns = random.Random(seed)
    woven = b""
    while any(streams):
        at = turns.choice([at for at, stream in enumerate(streams) if stream])
        woven += parts[at].feed(streams[at].pop(0))
    for part in parts:
        part.end()
    woven += usage_event(parts) + DONE
    whole = b"".join(events(range(count), n, text, "cmpl-0", counted=counted, seed=seed))

    ours, theirs = parsed(woven), parsed(whole)
    assert ours[-1] == theirs[-1] == "done"
    shared = {(event["id"], event["created"], event["model"]) for event in ours[:-1]}
    assert len(shared) == 1
    name = shared.pop()[0]
    assert common.response_id == name
    for event in theirs[:-1]:
        event |= {"id": name, "created": int(name[5:])}
    if counted:  # whose cached tokens are told depends on who was first
        told = ours[0]["choices"][0]["token_ids"][0]
        theirs[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] = 16 * told
        assert ours[-2] == theirs[-2]
    for index in range(count * n):
        assert of_choice(ours, index) == of_choice(theirs, index)
    assert woven == b"".join(sse(event) for event in ours[:-1]) + DONE  # no value was written anew


def of_choice(stream: list[Any], index: int) -> list[Any]:
    return [event for event in stream if event != "done" and event["choices"] and event["choices"][0]["index"] == index]


def part(positions: Sequence[int] = (3, 5), n: int = 1) -> PartEvents:
    return PartEvents(Places(positions, n), Common())


def test_only_id_and_index_change_in_an_event() -> None:
    common = Common()
    first, second = PartEvents(Places([0], 2), common), PartEvents(Places([1], 2), common)
    head = b'"object":"text_completion","created":5,"model":"m"'
    assert first.feed(b'data: {"id":"a",%b,"choices":[{"index":1,"text":"x"}]}\n\n' % head)
    later = b'"choices":[{"index":%d,"text":" \\"choices\\":[{\\"index\\":0","logprobs":{"x": 1.50}}],"usage":null}\n\n'
    came = b'data: {"id":"b",%b,' % head.replace(b"5", b"6") + later % 1
    assert second.feed(came) == b'data: {"id":"a",%b,' % head + later % 3
    assert second.feed(came) == b'data: {"id":"a",%b,' % head + later % 3


def test_events_that_are_written_otherwise() -> None:
    events = part()
    assert json.loads(events.feed(b'data:{"choices": [{"text": "x", "index": 1}], "id": "a"}\n\n')[6:]) == {
        "choices": [{"text": "x", "index": 5}],
        "id": "a",
    }
    two = b'data: {"id":"b","choices":[{"index":0,"text":"x"},{"index":1,"text":"y"}]}\n\n'
    assert events.feed(two) == b'data: {"id":"a","choices":[{"index":3,"text":"x"},{"index":5,"text":"y"}]}\n\n'
    assert events.feed(b": ping\n\n") == b""
    assert events.feed(b'data: {"id":null,"choices":[{"index":0}],"more":1}\n\n') == (
        b'data: {"id":"a","choices":[{"index":3}],"more":1}\n\n'
    )


def test_an_error_ends_a_part() -> None:
    events = part()
    said = b'data: {"error":{"message":"\\"choices\\":[{\\"index\\":","code":500}}'
    good = b'data: {"id":"a","choices":[{"index":0,"text":"x"}]}\n\n'
    assert events.feed(good + said + b"\n\n" + good + DONE) == good.replace(b":0,", b":3,")
    assert events.error == said
    assert not events.done


def test_nothing_counts_after_the_end() -> None:
    events = part()
    good = b'data: {"id":"a","choices":[{"index":0,"text":"x"}]}\n\n'
    assert events.feed(DONE + good) == events.feed(good) == b""
    events.end()


def test_a_stream_that_ends_too_early() -> None:
    events = part()
    events.feed(DONE[:-1])
    with pytest.raises(UpstreamError):
        events.end()


@pytest.mark.parametrize(
    "event",
    [
        b"event: message",
        b"data: ",
        b"data: x",
        b"data: [1]",
        b"data: {}",
        b'data: {"choices":null}',
        b'data: {"choices":[{"index":2,"text":"x"}]}',
        b'data: {"choices":[{"index":-1,"text":"x"}]}',
        b'data: {"choices":[{"index":"0","text":"x"}]}',
        b'data: {"choices":[{"index":1e0,"text":"x"}]}',
        b'data: {"choices":[{"text":"x"}]}',
        b'data: {"id":"choices":[{"index":0,"text":"x"}]}',
        b"data: " + b"[" * 100_000,
    ],
)
def test_what_is_no_event_of_two_prompts(event: bytes) -> None:
    with pytest.raises(Unmergeable):
        part().feed(event + b"\n\n")


def test_usage_is_told_only_if_all_parts_tell_it() -> None:
    common = Common()
    parts = [PartEvents(Places([at], 1), common) for at in range(2)]
    told = b'data: {"id":"a","choices":[],"usage":{"prompt_tokens":4,"completion_tokens":2},"metrics":{"x":1}}\n\n'
    assert parts[0].feed(told) == b""
    assert usage_event(parts) == b""
    assert parts[1].feed(told) == b""
    assert parsed(usage_event(parts)) == [
        {"id": "a", "choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 4}}
    ]


@settings(deadline=None)
@given(st.lists(st.text("a\n", max_size=5)), st.integers(0, 10**6))
def test_cutting_does_not_depend_on_the_chunks(lines: list[str], seed: int) -> None:
    data = "".join(lines).encode()
    cutter = Cutter()
    found = [event for chunk in cut(data, seed) for event in cutter.feed(chunk)]
    assert found == data.split(b"\n\n")[: len(found)]
    assert len(found) == data.count(b"\n\n")


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_stream, "LONGEST_EVENT", 1000)
    cutter = Cutter()
    with pytest.raises(Unmergeable):
        for _ in range(12):
            cutter.feed(b"x" * 100)
