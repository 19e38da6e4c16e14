import json

import httpx

from proxy.simulator import BASE, expected_tokens
from proxy.simulator.tokenizer import decode, render_chat
from tests.simulator.conftest import Start

HELLO = [{"role": "user", "content": "hello there, replica"}]


async def test_chat_answers_from_the_template(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body = {
        "messages": HELLO,
        "max_completion_tokens": 4,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    prompt = render_chat(HELLO)
    for cached in (0, len(prompt) // 16 * 16):
        answer = (await http.post(f"{replica.url}/v1/chat/completions", json=body)).json()
        choice, details = answer["choices"][0], answer["usage"]["prompt_tokens_details"]
        assert answer["prompt_token_ids"] == prompt
        assert choice["token_ids"] == expected_tokens(BASE, prompt, 4)
        assert choice["message"]["content"] == decode(choice["token_ids"])
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [2] * 4
        assert (details["cached_tokens"], details["created_cache_tokens"]) == (cached, len(prompt) // 16 * 16 - cached)


async def test_a_chat_without_limit_ends_by_itself(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    choice = (await http.post(f"{replica.url}/v1/chat/completions", json={"messages": HELLO})).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["content"])) == ("stop", 64)


async def test_chat_streams(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    text = (await http.post(f"{replica.url}/v1/chat/completions", json=body)).text
    first, *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line and line != "data: [DONE]"]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert said == decode(expected_tokens(BASE, render_chat(HELLO), 3))
    assert last["usage"]["completion_tokens"] == 3


async def test_bad_chats(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    for messages in (None, [], "hi", ["hi"], [{"content": "hi"}]):
        answer = await http.post(f"{replica.url}/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400, messages


async def test_generate_is_tokens_in_tokens_out(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    url, prompt = f"{replica.url}/inference/v1/generate", list(range(30, 70))
    parameters = {"max_tokens": 4, "seed": 9, "logprobs": 0}
    answer = (await http.post(url, json={"token_ids": prompt, "sampling_params": parameters})).json()
    assert answer["choices"][0]["token_ids"] == expected_tokens(BASE, prompt, 4, seed=9)
    assert answer["choices"][0]["logprobs"]["content"][0]["bytes"] is None
    body = {
        "token_ids": prompt,
        "sampling_params": parameters,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = (await http.post(url, json=body)).text
    *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line and line != "data: [DONE]"]
    assert [chunk["choices"][0]["token_ids"][0] for chunk in chunks] == expected_tokens(BASE, prompt, 4, seed=9)
    assert last["usage"]["prompt_tokens"] == 40
    wrong = await http.post(url, json={"token_ids": [-1], "sampling_params": {}})
    assert wrong.status_code == 400
