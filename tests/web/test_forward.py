"""The data path over real sockets: what goes up, what comes down, byte for byte."""

from __future__ import annotations

import json

import httpx
import pytest

from proxy.control.desired import Adapter
from proxy.web.forward import Forwarder
from tests.web.front import Client, Front, front, until
from tests.web.scripted import ANSWER, Call, Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 2}
V1 = Adapter("trl-policy-v1", "/a/v1", "sha256:" + "a" * 64, "trl-policy-v1")
V2 = Adapter("trl-policy-v2", "/a/v2", None, "trl-policy-v2")
REBOUND = Adapter("trl-policy-v1", "/b/v1", "sha256:" + "b" * 64, "trl-policy-v1@bbbbbbbbbbbb")


async def post(it: Front, body: object = REQUEST, path: str = "/v1/completions", **more: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with httpx.AsyncClient(timeout=20) as client:
        headers = {"content-type": "application/json", **(more.pop("headers", None) or {})}  # type: ignore[dict-item]
        return await client.post(it.url + path, content=content, headers=headers)


async def test_an_answer_comes_through_with_our_headers() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        answer = await post(it, path="/v1/completions?a=%2F&b=")
    assert answer.status_code == 200
    assert answer.json() == ANSWER
    assert answer.headers["x-lorafleet-replica"] == "0"
    assert answer.headers["x-lorafleet-route"]
    assert answer.headers["x-lorafleet-predicted-cached-tokens"] == "0"
    assert "x-lorafleet-adapter" not in answer.headers
    call = replica.calls[0]
    assert (call.method, call.target) == ("POST", "/v1/completions?a=%2F&b=")
    assert call.json() == REQUEST
    outcome = it.notes.outcomes[0]
    assert (outcome.status, outcome.replica, outcome.attempts, outcome.cut) == (200, 0, 1, False)
    assert outcome.response_id == "cmpl-1"
    assert outcome.usage is not None
    assert (outcome.usage.prompt_tokens, outcome.usage.cached_tokens, outcome.usage.output_tokens) == (3, 1, 2)
    await replica.stop()


@pytest.mark.parametrize("status", [200, 201, 400, 404, 422, 429, 500, 501])
async def test_no_status_is_changed(status: int) -> None:
    replica = await Scripted(lambda call: call.answer(b'{"detail": "x"}', status)).start()
    async with front([replica.url]) as it:
        answer = await post(it)
    assert (answer.status_code, answer.content) == (status, b'{"detail": "x"}')
    assert len(replica.calls) == 1
    await replica.stop()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"\x00\xff", b'{"model": 5}', b'{"model": null, "prompt": "x"}', b'{"model": ""}'],
)
async def test_what_cannot_be_read_is_forwarded_untouched(body: bytes) -> None:
    replica = await Scripted(lambda call: call.answer(b"no", 400)).start()
    async with front([replica.url]) as it:
        assert (await post(it, body)).status_code == 400
    assert replica.calls[0].body == body
    await replica.stop()


async def test_a_stream_comes_chunk_by_chunk() -> None:
    async def script(call: Call) -> None:
        call.stream()
        call.event(model="base", choices=[{"index": 0, "text": "a"}])
        await middle
        call.event(model="base", choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1})
        call.chunk(b"data: [DONE]\n\n")
        call.end()

    import asyncio

    middle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post({**REQUEST, "stream": True})
        assert b'"text":"a"' in await client.until(b"}\n\n")
        middle.set_result(None)  # only now, so nothing was held back
        assert (await client.until(b"0\r\n\r\n")).count(b"data: ") == 2
        await until(lambda: it.notes.outcomes)
        usage = it.notes.outcomes[0].usage
        assert usage is not None and usage.prompt_tokens == 9
        client.leave()
    await replica.stop()


async def test_an_unknown_model_is_404_in_vllms_words() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        answer = await post(it, {**REQUEST, "model": "trl-policy-v9"})
    message = "The model `trl-policy-v9` does not exist."
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": {"message": message, "type": "NotFoundError", "param": "model", "code": 404}}
    assert not replica.calls
    await replica.stop()


async def test_an_adapter_is_named_in_the_headers_and_goes_up_as_it_is() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        it.bind(V1, V2)
        first = await post(it, {**REQUEST, "model": "trl-policy-v1"})
        second = await post(it, {**REQUEST, "model": "trl-policy-v2"})
    assert first.headers["x-lorafleet-adapter"] == "trl-policy-v1"
    assert first.headers["x-lorafleet-digest"] == V1.digest
    assert second.headers["x-lorafleet-adapter"] == "trl-policy-v2"
    assert "x-lorafleet-digest" not in second.headers
    assert replica.calls[0].body == json.dumps({**REQUEST, "model": "trl-policy-v1"}).encode()
    await replica.stop()


async def test_a_name_bound_again_goes_up_under_its_other_name_and_comes_back_as_written() -> None:
    def script(call: Call) -> None:
        call.answer({**ANSWER, "model": call.json()["model"]})

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        it.bind(REBOUND)
        answer = await post(it, b'{ "model":"trl-policy-v1","x": 1.50 , "prompt":[1,  2]}')
    assert replica.calls[0].body == b'{"model":"trl-policy-v1@bbbbbbbbbbbb","x":1.50,"prompt":[1,  2]}'
    assert not replica.calls[0].header("accept-encoding")
    assert answer.json() == {**ANSWER, "model": "trl-policy-v1"}
    assert int(answer.headers["content-length"]) == len(answer.content)
    await replica.stop()


async def test_latest_is_the_newest_version_and_the_answer_says_which() -> None:
    replica = await Scripted(lambda call: call.answer({**ANSWER, "model": call.json()["model"]})).start()
    async with front([replica.url]) as it:
        it.bind(V1, V2)
        answer = await post(it, {**REQUEST, "model": "trl-policy-latest"})
    assert replica.calls[0].json()["model"] == "trl-policy-v2"
    assert answer.json()["model"] == answer.headers["x-lorafleet-adapter"] == "trl-policy-v2"
    await replica.stop()


async def test_a_rebound_name_in_a_stream_cut_anywhere() -> None:
    event = b'data: {"id":"c","model":"trl-policy-v1@bbbbbbbbbbbb","choices":[]}\n\n'

    async def script(call: Call) -> None:
        call.stream()
        for at in range(1, len(event)):
            call.chunk(event[:at])
            call.chunk(event[at:])
        call.end()

    replica = await Scripted(lambda call: script(call)).start()
    async with front([replica.url]) as it:
        it.bind(REBOUND)
        answer = await post(it, {**REQUEST, "model": "trl-policy-v1", "stream": True})
    assert answer.content == event.replace(b"@bbbbbbbbbbbb", b"") * (len(event) - 1)
    await replica.stop()


async def test_a_rebound_name_in_an_error_message() -> None:
    def script(call: Call) -> None:
        call.answer({"error": {"message": f"`{call.json()['model']}` is too long", "code": 400}}, 400)

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        it.bind(REBOUND)
        answer = await post(it, {**REQUEST, "model": "trl-policy-v1"})
    assert answer.json()["error"]["message"] == "`trl-policy-v1` is too long"
    await replica.stop()


async def test_a_compressed_answer_passes_with_its_header() -> None:
    replica = await Scripted(lambda call: call.answer(b"\x1f\x8b-no-real-gzip", 200, "content-encoding: br-x")).start()
    async with front([replica.url]) as it:
        answer = await post(it, headers={"accept-encoding": "br-x"})
    assert answer.headers["content-encoding"] == "br-x"
    assert answer.content == b"\x1f\x8b-no-real-gzip"
    assert replica.calls[0].header("accept-encoding") == ["br-x"]
    await replica.stop()


async def test_headers_of_ours_do_not_go_up() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        await post(it, headers={"x-lorafleet-replica": "7", "authorization": "Bearer mine", "x-request-id": "r"})
    call = replica.calls[0]
    assert not call.header("x-lorafleet-replica")
    assert not call.header("authorization")
    assert call.header("x-request-id") == ["r"]
    await replica.stop()


async def test_to_any_resolves_names_and_leaves_no_lease() -> None:
    replica = await Scripted(lambda call: call.answer({"tokens": [1]})).start()
    async with front([replica.url]) as it:
        it.bind(REBOUND)
        answer = await post(it, {"model": "trl-policy-v1", "prompt": "x"}, "/tokenize")
        missing = await post(it, {"model": "trl-policy-v9", "prompt": "x"}, "/tokenize")
        async with httpx.AsyncClient() as client:
            got = await client.get(it.url + "/something?x=1")
            head = await client.head(it.url + "/something")
        assert it.fleet.replicas[0].requests == 0
    assert (answer.json(), missing.status_code) == ({"tokens": [1]}, 404)
    assert replica.calls[0].json()["model"] == REBOUND.upstream
    assert "x-lorafleet-route" not in got.headers
    assert head.status_code == 200
    assert [(call.method, call.target) for call in replica.calls[1:]] == [
        ("GET", "/something?x=1"),
        ("HEAD", "/something"),
    ]
    await replica.stop()


async def test_three_server_errors_in_a_row_are_a_broken_call_and_4xx_are_not() -> None:
    statuses = iter([500, 500, 200, 500, 500, 400, 500, 500, 500])
    replica = await Scripted(lambda call: call.answer(b"{}", next(statuses))).start()
    async with front([replica.url]) as it:
        seen = []
        for _ in range(9):
            await post(it)
            seen.append(it.fleet.replicas[0].failures)
    assert seen == [0, 0, 0, 0, 0, 0, 0, 0, 1]
    await replica.stop()


def test_both_entries_are_plain_asgi() -> None:
    assert {"completion", "to_any"} <= set(dir(Forwarder))
