"""What two parsers could read in two ways is refused and the connection closed: no request hides inside another."""

from __future__ import annotations

import pytest

from tests.web.front import Client, each_transport, front  # noqa: F401
from tests.web.scripted import Scripted

BODY = b'{"model":"base","prompt":[1]}'
SMUGGLED = b"POST /v1/load_lora_adapter HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"

AMBIGUOUS = {
    "both": b"content-length: 29\r\ntransfer-encoding: chunked\r\n",
    "both, the other way round": b"transfer-encoding: chunked\r\ncontent-length: 29\r\n",
    "two lengths": b"content-length: 29\r\ncontent-length: 30\r\n",
    "the same length twice": b"content-length: 29\r\ncontent-length: 29\r\n",
    "a list of lengths": b"content-length: 29, 29\r\n",
    "a negative length": b"content-length: -1\r\n",
    "a signed length": b"content-length: +29\r\n",
    "a hexadecimal length": b"content-length: 0x1d\r\n",
    "an empty length": b"content-length:\r\n",
    "chunked twice": b"transfer-encoding: chunked, chunked\r\n",
    "chunked and more": b"transfer-encoding: chunked, identity\r\n",
    "an unknown coding": b"transfer-encoding: xchunked\r\n",
    "a tab in the coding": b"transfer-encoding: \x0bchunked\r\n",
    "two codings": b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    "a space before the colon": b"content-length : 29\r\n",
    "a space in a name": b"content length: 29\r\n",
    "a folded line": b"x: a\r\n b\r\ncontent-length: 29\r\n",
    "a bare carriage return": b"x: a\rcontent-length: 29\r\n",
    "a NUL": b"x: a\0b\r\ncontent-length: 29\r\n",
}


@pytest.mark.parametrize("headers", AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
async def test_ambiguous_requests_are_refused_and_the_connection_closed(path: bytes, headers: bytes) -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.send(b"POST %b HTTP/1.1\r\nhost: x\r\n%b\r\n%b%b" % (path, headers, BODY, SMUGGLED))
        answer = await client.rest()  # ends: the connection is closed
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert not replica.calls
        client.leave()
    await replica.stop()


@pytest.mark.parametrize(
    "target", ["/v1/x%0d%0aevil:%201", "/v1/x%00", "/v1/%2e%2e/%2e%2e/pause", "/v1//x/../y", "/v1/x?a=%0d%0a&b=;"]
)
async def test_an_encoded_target_stays_encoded(target: str) -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.send(f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        await client.until(b"\r\n\r\n")
        assert [call.target for call in replica.calls] == [target]
        client.leave()
    await replica.stop()


async def test_hop_by_hop_headers_stay_here() -> None:
    replica = await Scripted(
        lambda call: call.answer(
            b"{}", 200, "x-hop: 1", "connection: keep-alive, x-hop", "keep-alive: timeout=5", "x: y"
        )
    ).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        lines = ("connection: keep-alive, x-mine", "x-mine: 1", "te: trailers", "upgrade: h2c", "x-other: 1")
        client.post({"model": "base"}, "/v1/completions", *lines)
        head = (await client.until(b"\r\n\r\n")).lower()
        call = replica.calls[0]
        assert call.header("x-other") == ["1"]
        assert not call.header("x-mine")
        assert not call.header("te")
        assert not call.header("upgrade")
        assert b"\r\nx: y\r\n" in head
        assert b"x-hop" not in head
        assert b"keep-alive" not in head
        client.leave()
    await replica.stop()


async def test_a_chunked_request_goes_up_with_its_length() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert b" 200 " in await client.until(b"\r\n\r\n")
        call = replica.calls[0]
        assert call.body == BODY
        assert call.header("content-length") == [str(len(BODY))]
        assert not call.header("transfer-encoding")
        client.leave()
    await replica.stop()
