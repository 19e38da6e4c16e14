"""Bodies up to the limit pass; one byte more is refused so that the client hears why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.web.front import Client, each_transport, front, until  # noqa: F401
from tests.web.scripted import Call, Scripted

LIMIT = 100_000
POST = b"POST %b HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_exactly_the_limit(path: str) -> None:
    replica = await Scripted().start()
    async with front([replica.url], max_body_bytes=LIMIT) as it, httpx.AsyncClient(timeout=20) as client:
        fits = await client.post(it.url + path, content=b" " * LIMIT)
        over = await client.post(it.url + path, content=b" " * (LIMIT + 1))
    assert fits.status_code == 200
    assert over.status_code == 413
    assert over.json()["error"]["code"] == 413
    assert over.headers["connection"] == "close"
    assert [len(call.body) for call in replica.calls] == [LIMIT]
    await replica.stop()


async def test_a_declared_length_is_refused_before_a_byte_of_it_came() -> None:
    async with front(["http://127.0.0.1:9"], max_body_bytes=LIMIT) as it:
        client = await Client.connect(it)
        client.send(POST % b"/v1/completions" + b"content-length: 999999999999\r\n\r\n")
        assert b" 413 " in await client.until(b"\r\n\r\n")
        client.leave()


async def test_a_client_that_waits_to_be_asked_is_not_asked() -> None:
    async with front(["http://127.0.0.1:9"], max_body_bytes=LIMIT) as it:
        client = await Client.connect(it)
        client.send(POST % b"/v1/completions" + b"content-length: 100001\r\nexpect: 100-continue\r\n\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_chunked_body_is_refused_as_soon_as_it_is_over() -> None:
    async with front(["http://127.0.0.1:9"], max_body_bytes=LIMIT) as it:
        client = await Client.connect(it)
        client.send(POST % b"/v1/completions" + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(3):
            client.send(b"%x\r\n%b\r\n" % (40_000, b" " * 40_000))
        assert b" 413 " in await client.until(b"\r\n\r\n")  # the last chunk has not been sent
        client.leave()


async def test_who_writes_all_of_it_first_still_hears_why() -> None:
    """Closing with unread bytes resets the connection, and the answer is lost with it."""

    async with front(["http://127.0.0.1:9"], max_body_bytes=LIMIT) as it:
        client = await Client.connect(it)
        client.send(POST % b"/v1/completions" + b"content-length: 8000000\r\n\r\n")
        for _ in range(80):
            client.send(b" " * 100_000)
            await client.writer.drain()
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 413


async def test_200_000_token_prompts_and_chunked_bodies_pass() -> None:
    replica = await Scripted().start()
    body = json.dumps({"model": "base", "prompt": list(range(200_000))}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    async with front([replica.url]) as it, httpx.AsyncClient(timeout=60) as client:
        whole = await client.post(it.url + "/v1/completions", content=body)
        chunked = await client.post(it.url + "/v1/completions", content=pieces())
    assert (whole.status_code, chunked.status_code) == (200, 200)
    assert [call.body for call in replica.calls] == [body, body]
    await replica.stop()


async def test_large_answers_pass_at_the_clients_pace() -> None:
    """A client that does not read stops the replica, instead of filling the proxy's memory."""
    size, chunk = 400, b"x" * 65_536
    written = 0

    async def script(call: Call) -> None:
        nonlocal written
        call.stream()
        for _ in range(size):
            call.chunk(chunk)
            await call.drain()
            written += 1
        call.end()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post({"model": "base", "prompt": [1]})
        await client.until(b"\r\n\r\n")
        before = -1
        while before != written:  # it has come to a halt
            before = written
            await asyncio.sleep(0.2)
        assert written < size
        await client.count(b"x", size * len(chunk))
        await until(lambda: it.notes.outcomes)
        client.leave()
    await replica.stop()
