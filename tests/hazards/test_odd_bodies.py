"""Whatever JSON a client writes, what a name means holds, and nothing is answered with a 500 of ours."""

from __future__ import annotations

import json

import httpx
import pytest

from proxy.control.desired import Adapter
from tests.web.front import front
from tests.web.scripted import ANSWER, Call, Scripted

REBOUND = Adapter("v1", "/b/v1", None, "v1@bbbbbbbbbbbb")

# All of these vLLM reads as a request for "v1": Python's JSON reader takes more than the standard.
SAME = {
    "nan": b'{"model": "v1", "prompt": [1], "temperature": NaN}',
    "infinity": b'{"model": "v1", "prompt": [1], "temperature": -Infinity}',
    "utf-16": '{"model": "v1", "prompt": "ä"}'.encode("utf-16"),
    "utf-32": '{"model": "v1", "prompt": "ä"}'.encode("utf-32-le"),
    "byte order mark": b'\xef\xbb\xbf{"model": "v1", "prompt": [1]}',
    "escaped key": b'{"mod\\u0065l": "v1", "prompt": [1]}',
    "escaped value": b'{"model": "\\u00761", "prompt": [1]}',
    "twice": b'{"model": "v2", "prompt": [1], "model": "v1"}',
    "twice, with nan": b'{"model": "v2", "x": NaN, "model": "v1"}',
    "lone surrogate": b'{"model": "v1", "prompt": "\\ud800"}',
    "inside the prompt": b'{"prompt": [1, 2], "x": {"model": "v2"}, "model": "v1"}',
    "model in a text": b'{"prompt": "\\"model\\": \\"v2\\"", "model": "v1"}',
    "white space": b' \n{ "model"\t:\r\n"v1" , "prompt" : [ 1 , 2 ] } \n',
    "stream is no bool": b'{"model": "v1", "prompt": [1], "stream": "yes", "n": "2"}',
    "deep": b'{"model": "v1", "prompt": ' + b"[" * 300 + b"]" * 300 + b"}",
    "large number": b'{"model": "v1", "prompt": [1], "seed": 123456789012345678901234567890}',
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
async def test_a_rebound_name_is_never_served_under_its_old_meaning(body: bytes, path: str) -> None:
    def script(call: Call) -> None:
        call.answer({**ANSWER, "model": json.loads(call.body)["model"]})

    replica = await Scripted(script).start()
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        it.bind(REBOUND)
        answer = await client.post(it.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    sent = json.loads(replica.calls[0].body)
    assert sent["model"] == REBOUND.upstream
    was = json.loads(body)
    assert repr({**sent, "model": ""}) == repr({**was, "model": ""})
    assert answer.json()["model"] == "v1"
    await replica.stop()


@pytest.mark.parametrize("body", SAME.values(), ids=SAME)
async def test_a_name_that_is_not_committed_is_not_served(body: bytes) -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(it.url + "/v1/completions", content=body)
    assert answer.status_code == 404
    assert not replica.calls
    await replica.stop()


@pytest.mark.parametrize("model", [b"\\ud800", b"a\\udfff\\ud800b", b"\\u0000", b"`\\n\\r", b"x" * 100_000])
async def test_a_name_that_cannot_be_is_404(model: bytes) -> None:
    async with front(["http://127.0.0.1:9"]) as it, httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(it.url + "/v1/completions", content=b'{"model": "%b"}' % model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404)


PROMPTS = {
    "text": "Hello",
    "texts": ["Hello", "World"],
    "tokens": [1, 2, 3],
    "token lists": [[1, 2], [3]],
    "mixed": ["x", [1]],
    "empty": [],
    "nothing": None,
    "an object": {"a": 1},
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
}


@pytest.mark.parametrize("field", ["prompt", "messages", "input", "token_ids"])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
async def test_every_form_of_a_prompt_goes_through_untouched(prompt: object, field: str) -> None:
    replica = await Scripted().start()
    body = json.dumps({"model": "base", field: prompt}).encode()
    paths = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"]
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        for path in paths:
            assert (await client.post(it.url + path, content=body)).status_code == 200
    assert [call.body for call in replica.calls] == [body] * len(paths)
    await replica.stop()
