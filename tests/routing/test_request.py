"""Bodies of all routed endpoints, and bodies that nobody should have sent."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import MAX_PROMPTS, ROUTED_PATHS, RouteRequest, parse

COMPLETIONS = "/v1/completions"


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def seen(request: RouteRequest) -> list[tuple[Kind, bytes]]:
    return [(prompt.kind, prompt.canonical()) for prompt in request.prompts]


def test_the_fields_of_a_rollout() -> None:
    request = parse(
        COMPLETIONS,
        body(model="trl-policy-v3", prompt=[1, 2, 3], max_tokens=64, n=2, stream=True, cache_salt="s", seed=7),
    )
    assert (request.model, request.salt, request.stream, request.n, request.max_tokens) == (
        "trl-policy-v3",
        "s",
        True,
        2,
        64,
    )
    assert seen(request) == [(Kind.TOKENS, b"1,2,3,")]
    assert request.reads_cache


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", [(Kind.TEXT, b"hello")]),
        ('gr\u00fc\u00df "dich"', [(Kind.TEXT, 'grüß "dich"'.encode())]),
        (["a", "b"], [(Kind.TEXT, b"a"), (Kind.TEXT, b"b")]),
        ([1, 22, 333], [(Kind.TOKENS, b"1,22,333,")]),
        ([[1, 2], [3]], [(Kind.TOKENS, b"1,2,"), (Kind.TOKENS, b"3,")]),
        ([[7]], [(Kind.TOKENS, b"7,")]),
    ],
)
def test_every_form_of_a_prompt(prompt: Any, expected: list[tuple[Kind, bytes]]) -> None:
    assert seen(parse(COMPLETIONS, body(model="m", prompt=prompt))) == expected


def test_white_space_makes_no_difference() -> None:
    ids = list(range(100, 180))
    bodies = [
        body(prompt=ids),
        json.dumps({"prompt": ids}, separators=(",", ":")).encode(),
        json.dumps({"prompt": ids}, indent=2).encode(),
        b'{\n "prompt"\t:\r\n [ ' + b" ,\n".join(b"%d" % it for it in ids) + b" ] }",
    ]
    assert len({bytes(seen(parse(COMPLETIONS, it))[0][1]) for it in bodies}) == 1


def test_a_list_is_cut_out_only_where_it_is_the_prompt() -> None:
    nested = b'{"extra": {"prompt": [1, 2]}, "prompt": "text"}'
    assert seen(parse(COMPLETIONS, nested)) == [(Kind.TEXT, b"text")]
    twice = b'{"prompt": [1, 2], "prompt": [3, 4]}'
    assert seen(parse(COMPLETIONS, twice)) == [(Kind.TOKENS, b"3,4,")]
    in_text = json.dumps({"user": 'say "prompt": [9, 9]', "prompt": [1]}).encode()
    assert seen(parse(COMPLETIONS, in_text)) == [(Kind.TOKENS, b"1,")]


def test_chat_messages_are_one_stream_that_grows_by_turns() -> None:
    first = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    longer = [*first, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "bye"}]
    one = seen(parse("/v1/chat/completions", body(messages=first)))[0]
    two = seen(parse("/v1/chat/completions", body(messages=longer)))[0]
    assert one[0] is Kind.CHAT
    assert two[1].startswith(one[1])


def test_chat_ignores_the_order_of_keys_and_how_text_is_wrapped() -> None:
    plain = b'{"messages": [{"role": "user", "content": "hi"}]}'
    turned = b'{"messages":[{"content":"hi","role":"user"}]}'
    parts = b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}'
    assert len({bytes(seen(parse("/v1/chat/completions", it))[0][1]) for it in (plain, turned, parts)}) == 1


def test_tools_stand_before_the_messages() -> None:
    messages = [{"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    without = seen(parse("/v1/chat/completions", body(messages=messages)))[0][1]
    with_tools = seen(parse("/v1/chat/completions", body(messages=messages, tools=tools)))[0][1]
    assert with_tools.endswith(without) and with_tools != without


def test_responses_and_messages() -> None:
    asked = seen(parse("/v1/responses", body(input="hi", instructions="be brief", max_output_tokens=9)))[0]
    same = seen(parse("/v1/responses", body(input=[{"role": "user", "content": "hi"}], instructions="be brief")))[0]
    assert asked == same
    anthropic = parse(
        "/v1/messages", body(system="be brief", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
    )
    assert seen(anthropic)[0] == asked
    assert anthropic.max_tokens == 5


def test_tokens_in_tokens_out() -> None:
    request = parse("/inference/v1/generate", body(token_ids=[5, 6], sampling_params={"max_tokens": 3, "n": 4}))
    assert (request.n, request.max_tokens, seen(request)) == (4, 3, [(Kind.TOKENS, b"5,6,")])


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    assert not parse(COMPLETIONS, body(prompt="a", prompt_logprobs=0)).reads_cache
    assert parse(COMPLETIONS, body(prompt="a", logprobs=0)).reads_cache


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": [1, 2',
        b'{"prompt": {}}',
        b'{"prompt": true}',
        b'{"prompt": null}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [[[1]]]}',
        b'{"prompt": [null]}',
        b'{"prompt": 12}',
        b"\xff\xfe{",
        b'\xef\xbb\xbf{"prompt": [1]}',
        b"[" * 200_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"messages": {}}',
        b'{"input": 1}',
    ],
)
@pytest.mark.parametrize("path", sorted(ROUTED_PATHS))
def test_odd_bodies_have_nothing_to_route_by(path: str, odd: bytes) -> None:
    assert parse(path, odd).prompts == ()


def test_other_paths_have_nothing_to_route_by() -> None:
    assert parse("/v1/embeddings", body(prompt=[1])) == RouteRequest()


def test_wrong_types_cost_only_their_own_field() -> None:
    request = parse(
        COMPLETIONS,
        b'{"model": 3, "stream": "yes", "n": true, "max_tokens": 1e400, "cache_salt": [], "prompt": [1]}',
    )
    assert (request.model, request.stream, request.n, request.salt) == (None, False, 1, "")
    huge = parse(COMPLETIONS, b'{"n": 99999999999999999999999, "max_tokens": -5, "prompt": [1]}')
    assert huge.n <= 1024 and huge.max_tokens == 0


def test_lone_surrogates_are_routed_too() -> None:
    text = parse(COMPLETIONS, b'{"prompt": "abc \\ud800 def"}')
    chat = parse("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}')
    assert len(text.prompts) <= 1 and len(chat.prompts) <= 1  # whichever way: no exception, and the same every time
    assert text == parse(COMPLETIONS, b'{"prompt": "abc \\ud800 def"}')


def test_long_batches_are_read_up_to_a_limit() -> None:
    assert len(parse(COMPLETIONS, body(prompt=["a"] * (MAX_PROMPTS + 5))).prompts) == MAX_PROMPTS


def test_a_million_tokens_stay_a_view_of_the_body() -> None:
    whole = b'{"prompt": [' + b",".join([b"123456"] * 1_000_000) + b"]}"
    prompt = parse(COMPLETIONS, whole).prompts[0]
    assert isinstance(prompt.raw, memoryview) and len(prompt.raw) == 7_000_000 - 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
NAMES = ("model", "prompt", "messages", "stream", "n", "max_tokens", "cache_salt", "token_ids", "sampling_params",
         "input", "instructions", "system", "tools")  # fmt: skip


@settings(deadline=None)
@given(st.sampled_from(sorted(ROUTED_PATHS)), st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_read_without_an_exception(path: str, fields: dict[str, Any]) -> None:
    request = parse(path, json.dumps(fields).encode())
    assert all(isinstance(prompt, Prompt) for prompt in request.prompts)
    assert request.n >= 1


@settings(deadline=None)
@given(st.sampled_from(sorted(ROUTED_PATHS)), st.binary(max_size=200))
def test_any_bytes_are_read_without_an_exception(path: str, raw: bytes) -> None:
    parse(path, raw)
    parse(path, b'{"prompt": [' + raw + b"], " + raw)


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=60))
def test_equal_token_ids_have_equal_keys_for_equal_bytes(ids: list[int]) -> None:
    first, second = (parse(COMPLETIONS, body(prompt=ids, seed=seed)).prompts[0] for seed in (1, 2))
    assert first.key == second.key and first.canonical() == second.canonical()
