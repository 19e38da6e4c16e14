import json
from typing import Any

import httpx

from proxy.simulator import BASE, expected_tokens
from proxy.simulator.tokenizer import decode, encode, render_chat
from tests.simulator.conftest import Start

HELLO = [{"role": "user", "content": "hello there, replica"}]
SAID = decode(expected_tokens(BASE, render_chat(HELLO), 3))


def named_events(text: str) -> list[tuple[str, Any]]:
    blocks = [block.split("\n", 1) for block in text.split("\n\n") if block]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


async def test_responses(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body: dict[str, Any] = {"input": HELLO[0]["content"], "max_output_tokens": 3}
    answer = (await http.post(f"{replica.url}/v1/responses", json=body)).json()
    assert answer["output"][0]["content"][0]["text"] == SAID
    assert (answer["status"], answer["usage"]["output_tokens"]) == ("incomplete", 3)
    events = named_events((await http.post(f"{replica.url}/v1/responses", json={**body, "stream": True})).text)
    assert [name for name, _ in events][:2] == ["response.created", "response.in_progress"]
    assert "".join(data["delta"] for name, data in events if name == "response.output_text.delta") == SAID
    assert events[-1][0] == "response.completed"
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert (await http.post(f"{replica.url}/v1/responses", json={"input": 5})).status_code == 400


async def test_messages(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 3}
    answer = (await http.post(f"{replica.url}/v1/messages", json=body)).json()
    assert answer["content"] == [{"type": "text", "text": SAID}]
    prompt = len(render_chat(HELLO))
    usage = answer["usage"]
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == prompt
    events = named_events((await http.post(f"{replica.url}/v1/messages", json={**body, "stream": True})).text)
    assert [name for name, _ in events][::6] == ["message_start", "message_delta"]
    assert "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta") == SAID
    missing = await http.post(f"{replica.url}/v1/messages", json={**body, "model": "nope"})
    assert missing.status_code == 404
    assert missing.json() == {
        "type": "error",
        "error": {"type": "NotFoundError", "message": "The model `nope` does not exist."},
    }
    counted = await http.post(f"{replica.url}/v1/messages/count_tokens", json=body)
    assert counted.json() == {"input_tokens": prompt}


async def test_tokenize(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    answer = await http.post(f"{replica.url}/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert answer.json() == {"count": 2, "max_model_len": 32768, "tokens": encode("hi"), "token_strs": ["h", "i"]}
    chat = await http.post(f"{replica.url}/tokenize", json={"messages": HELLO, "add_generation_prompt": False})
    assert chat.json()["tokens"] == render_chat(HELLO, add_generation_prompt=False)
    back = await http.post(f"{replica.url}/detokenize", json={"tokens": encode("hi")})
    assert back.json() == {"prompt": "hi"}


async def test_render(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    several = await http.post(f"{replica.url}/v1/completions/render", json={"prompt": [[5, 6], [7]], "max_tokens": 2})
    assert [item["token_ids"] for item in several.json()] == [[5, 6], [7]]
    chat = await http.post(f"{replica.url}/v1/chat/completions/render", json={"messages": HELLO})
    assert chat.json()["token_ids"] == render_chat(HELLO)
