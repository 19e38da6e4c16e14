"""What goes out and what comes back when nothing breaks; on both transports."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import ssl

import pytest

from proxy.errors import BadRequest
from proxy.upstream.transport import Endpoint, Transport

from .conftest import Make
from .scripted import OK, Peer, answering, eventually, once, serving

CLIENT_HEADERS = [
    (b"host", b"proxy.example"),
    (b"connection", b"keep-alive, x-private"),
    (b"x-private", b"between client and proxy"),
    (b"keep-alive", b"timeout=5"),
    (b"te", b"trailers"),
    (b"trailer", b"x-sum"),
    (b"transfer-encoding", b"chunked"),
    (b"upgrade", b"h2c"),
    (b"proxy-authorization", b"Basic abc"),
    (b"authorization", b"Bearer the-client's"),
    (b"x-api-key", b"the-client's"),
    (b"cookie", b"the-client's=1"),
    (b"expect", b"100-continue"),
    (b"content-length", b"999"),
    (b"x-forwarded-for", b"10.0.0.1"),
    (b"content-type", b"application/json"),
    (b"accept-encoding", b"zstd"),
    (b"x-twice", b"1"),
    (b"x-twice", b"2"),
    (b"x-text", "grüße".encode()),
]


async def test_request_as_the_replica_sees_it(transport: Transport) -> None:
    async with serving(answering(OK)) as server:
        endpoint = server.endpoint("sesame", prefix="/replica-0")
        response = await transport.request(
            endpoint, "POST", "//v1/../a%2Fb%zz;x?q=a+b%20c&q=%C3%BC&e=", headers=CLIENT_HEADERS, body=b"{}"
        )
        await response.read()
        [seen] = server.requests
    assert seen.line == b"POST /replica-0//v1/../a%2Fb%zz;x?q=a+b%20c&q=%C3%BC&e= HTTP/1.1"
    assert seen.body == b"{}"
    assert sorted((name.lower(), value) for name, value in seen.headers) == [
        (b"accept-encoding", b"zstd"),
        (b"authorization", b"Bearer sesame"),
        (b"content-length", b"2"),
        (b"content-type", b"application/json"),
        (b"host", b"127.0.0.1:%d" % server.port),
        (b"x-text", "grüße".encode()),
        (b"x-twice", b"1"),
        (b"x-twice", b"2"),
    ]


@pytest.mark.parametrize(("method", "lengths"), [("GET", []), ("HEAD", []), ("POST", [b"0"]), ("PUT", [b"0"])])
async def test_empty_body_is_announced_where_one_is_usual(
    transport: Transport, method: str, lengths: list[bytes]
) -> None:
    async with serving(answering(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        response = await transport.request(server.endpoint(), method, "/")
        assert (response.status, await response.read()) == (204, b"")
        assert server.requests[0].values(b"content-length") == lengths
        assert server.requests[0].values(b"authorization") == []


async def test_token_is_asked_on_every_call(transport: Transport) -> None:
    async with serving(answering(OK)) as server:
        tokens = iter(["one", "two", None, "four"])
        endpoint = Endpoint(server.endpoint().base, lambda: next(tokens))
        for _ in range(4):
            await (await transport.request(endpoint, "GET", "/")).read()
        sent = [each.values(b"authorization") for each in server.requests]
    assert sent == [[b"Bearer one"], [b"Bearer two"], [], [b"Bearer four"]]


async def test_response_headers_in_order_with_duplicates(transport: Transport) -> None:
    reply = b"HTTP/1.1 200 OK\r\nX-B: 1\r\nSet-Cookie: a=1\r\nset-cookie: b=2\r\nX-A:  2 \r\nContent-Length: 0\r\n\r\n"
    async with serving(answering(reply)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        await response.read()
        assert list(response.headers) == [
            (b"x-b", b"1"),
            (b"set-cookie", b"a=1"),
            (b"set-cookie", b"b=2"),
            (b"x-a", b"2"),
            (b"content-length", b"0"),
        ]
        await (await transport.request(server.endpoint(), "GET", "/")).read()
        assert server.requests[1].values(b"cookie") == []


BODIES = {
    "length": (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", 5),
    "chunked": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n", None),
    "trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-t\r\n\r\n5\r\nhello\r\n0\r\nx-t: 1\r\n\r\n",
        None,
    ),
    "until close": (b"HTTP/1.1 200 OK\r\n\r\nhello", None),
    "old": (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", 5),
    "after interim": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        5,
    ),
}


@pytest.mark.parametrize("pieces", ["one write", "trickle"])
@pytest.mark.parametrize("way", ["chunks", "read"])
@pytest.mark.parametrize("name", BODIES)
async def test_body(transport: Transport, name: str, way: str, pieces: str) -> None:
    reply, length = BODIES[name]
    script = once(reply) if pieces == "one write" else once(*(bytes([byte]) for byte in reply))
    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        assert (response.status, response.content_length) == (200, length)
        body = await response.read() if way == "read" else b"".join([chunk async for chunk in response.chunks()])
        assert body == b"hello"
        assert b"x-t" not in dict(response.headers)
        assert b"link" not in dict(response.headers)


async def test_whole_gives_a_body_that_is_already_there(transport: Transport) -> None:
    async with serving(answering(OK)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        body = response.whole()
        assert body == b"ok" or (body is None and await response.read() == b"ok")


async def test_whole_is_none_while_a_body_is_coming(transport: Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab")
        await go.wait()
        await peer.say(b"cd")

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        assert response.whole() is None
        go.set()
        assert await response.read() == b"abcd"


@pytest.mark.parametrize(
    ("method", "reply"),
    [
        ("HEAD", b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"),
        ("HEAD", b"HTTP/1.1 200 OK\r\n\r\n"),
        ("GET", b"HTTP/1.1 204 No Content\r\n\r\n"),
        ("GET", b"HTTP/1.1 304 Not Modified\r\ncontent-length: 500\r\n\r\n"),
        ("GET", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ],
)
async def test_no_body(transport: Transport, method: str, reply: bytes) -> None:
    async with serving(answering(reply)) as server:
        for _ in range(2):
            response = await transport.request(server.endpoint(), method, "/")
            assert [chunk async for chunk in response.chunks()] == []
        assert len(server.requests) == 2


async def test_compressed_body_is_untouched(transport: Transport) -> None:
    packed = gzip.compress(b"text " * 100)
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    async with serving(answering(head + packed)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        assert await response.read() == packed
        assert dict(response.headers)[b"content-encoding"] == b"gzip"
        assert response.content_length == len(packed)


async def test_stream_arrives_event_by_event(transport: Transport) -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(5):
            event = b"data: %d\n\n" % number
            await peer.say(b"%x\r\n%b\r\n" % (len(event), event))
            assert await seen.get() == event  # the next is not sent before this one has arrived
        await peer.say(b"0\r\n\r\n")

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "POST", "/", body=b"{}")
        events = []
        async for chunk in response.chunks():
            events.append(chunk)
            seen.put_nowait(chunk)
    assert events == [b"data: %d\n\n" % number for number in range(5)]


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_ten_megabytes_both_ways(transport: Transport, chunked: bool) -> None:
    up = bytes(range(256)) * 40_960
    down = up[::-1]

    async def script(peer: Peer) -> None:
        await peer.request()
        if chunked:
            await peer.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for start in range(0, len(down), 100_000):
                piece = down[start : start + 100_000]
                await peer.say(b"%x\r\n%b\r\n" % (len(piece), piece))
            await peer.say(b"0\r\n\r\n")
        else:
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(down), down))

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "POST", "/", body=up)
        body = b"".join([chunk async for chunk in response.chunks()])
        assert body == down
        response = await transport.request(server.endpoint(), "POST", "/", body=up)
        assert await response.read() == down
        assert [each.body == up for each in server.requests] == [True, True]


async def test_a_slow_reader_slows_the_replica_down(transport: Transport) -> None:
    block, blocks = b"x" * 65_536, 1_600  # 100 MiB: more than all socket buffers hold
    said = [0]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (len(block) * blocks))
        for _ in range(blocks):
            await peer.say(block)
            said[0] += 1

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        before, quiet = -1, 0
        while quiet < 20:
            quiet = quiet + 1 if said[0] == before else 0
            before = said[0]
            await asyncio.sleep(0.005)
        assert said[0] < blocks
        size = 0
        async for chunk in response.chunks():
            size += len(chunk)
        assert size == len(block) * blocks


async def test_redirect_is_not_followed(transport: Transport) -> None:
    reply = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://127.0.0.1:1/elsewhere\r\ncontent-length: 0\r\n\r\n"
    async with serving(answering(reply)) as server:
        response = await transport.request(server.endpoint("sesame"), "POST", "/", body=b"{}")
        await response.read()
        assert (response.status, len(server.requests)) == (307, 1)


async def test_proxies_and_credentials_of_the_environment_are_ignored(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with serving(answering(OK)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        assert await response.read() == b"ok"


async def test_huge_header(transport: Transport) -> None:
    value = b"v" * 100_000
    async with serving(answering(b"HTTP/1.1 200 OK\r\nx-huge: " + value + OK[15:])) as server:
        response = await transport.request(server.endpoint(), "GET", "/", headers=[(b"x-up", value)])
        assert dict(response.headers)[b"x-huge"] == value
        assert server.requests[0].values(b"x-up") == [value]
        await response.read()


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/a\r\nx: y", []),
        ("/a b", []),
        ("/a\n", []),
        ("/a#b", []),
        ("/\N{SNOWMAN}", []),
        ("a", []),
        ("", []),
        ("http://other/", []),
        ("/", [(b"x", b"a\r\nb: c")]),
        ("/", [(b"x", b"a\nb")]),
        ("/", [(b"x", b"a\rb")]),
        ("/", [(b"x", b"a\0b")]),
        ("/", [(b"x\r\ny", b"a")]),
        ("/", [(b"x y", b"a")]),
        ("/", [(b"transfer-encoding ", b"chunked")]),
        ("/", [(b"x:", b"a")]),
        ("/", [(b"", b"a")]),
    ],
)
async def test_injection_is_refused_before_anything_is_sent(
    transport: Transport, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    async with serving(answering(OK)) as server:
        with pytest.raises(BadRequest):
            await transport.request(server.endpoint(), "GET", target, headers=headers)
        assert server.peers == []


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "get", "GET /x HTTP/1.1\r\n", ""])
async def test_other_methods_are_refused(transport: Transport, method: str) -> None:
    async with serving(answering(OK)) as server:
        with pytest.raises(BadRequest):
            await transport.request(server.endpoint(), method, "/")
        assert server.peers == []


async def test_https(make: Make, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    transport = make(ssl_context=client_tls)
    big = b"b" * 1_000_000
    reply = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(big) + big
    async with serving(answering(OK, reply, OK), tls=server_tls) as server:
        bodies = []
        for body in (b"", big, big):
            response = await transport.request(server.endpoint("sesame"), "POST", "/", body=body)
            bodies.append(await response.read())
        assert bodies == [b"ok", big, b"ok"]
        assert [each.body for each in server.requests] == [b"", big, big]
        assert len(server.peers) == 1
        assert server.requests[0].values(b"host") == [b"localhost:%d" % server.port]
        await transport.close()
        await eventually(lambda: server.open == 0)


async def test_many_at_once(transport: Transport) -> None:
    numbers = itertools.count()

    async def script(peer: Peer) -> None:
        while True:
            seen = await peer.request()
            next(numbers)
            await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(seen.body), seen.body))

    async def one(number: int) -> bytes:
        response = await transport.request(server.endpoint(), "POST", "/", body=b"%d" % number)
        return await response.read()

    async with serving(script) as server:
        bodies = await asyncio.gather(*(one(number) for number in range(200)))
        assert bodies == [b"%d" % number for number in range(200)]
        assert next(numbers) == 200
