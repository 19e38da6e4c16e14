"""How each way of breaking is reported: the phase, short words, and nothing of the token or address."""

from __future__ import annotations

import asyncio
import ssl
import traceback

import pytest

from proxy.errors import LorafleetError, Phase, UpstreamError, UpstreamTimeout
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint, Transport

from .conftest import Make
from .scripted import OK, PATIENCE, Peer, Script, answering, eventually, once, refused_port, serving

CANARY = "canary-7f3a91"


async def failing(transport: Transport, endpoint: Endpoint, method: str = "POST") -> UpstreamError:
    """The error of a request that must break before its response has a head."""
    body = b"{}" if method == "POST" else b""
    with pytest.raises(UpstreamError) as caught:
        await transport.request(Endpoint(endpoint.base, lambda: CANARY), method, "/secret-path", body=body)
    check_discreet(caught.value, endpoint)
    return caught.value


def check_discreet(error: LorafleetError, endpoint: Endpoint) -> None:
    """Nothing that a log, a traceback or an attached exception could show has the token or address in it."""
    chain: list[BaseException] = [error]
    for each in chain:
        chain += [other for other in (each.__cause__, each.__context__) if other is not None and other not in chain]
    texts = [text for each in chain for text in (str(each), repr(each), repr(each.__dict__))]
    texts += traceback.format_exception(error, chain=True)
    address = endpoint.base.partition("//")[2]
    for text in (*texts, error.json().decode()):
        assert CANARY not in text
        assert address not in text
    assert len(error.message) < 60


async def test_connection_refused(transport: Transport) -> None:
    error = await failing(transport, Endpoint(f"http://127.0.0.1:{refused_port()}"))
    assert (error.message, error.phase) == ("connection refused", Phase.NOT_SENT)


async def test_name_not_resolved(make: Make) -> None:
    transport = make(connect_secs=2.0)  # some machines wait for a name server that is not there
    error = await failing(transport, Endpoint("http://no-such-host.invalid:8000"))
    assert error.phase is Phase.NOT_SENT
    assert error.message in ("name not resolved", "no connection in time")


async def test_connect_timeout(make: Make, client_tls: ssl.SSLContext) -> None:
    transport = make(connect_secs=0.05, ssl_context=client_tls)
    async with serving(Peer.gone) as server:  # accepts, and never shakes hands
        error = await failing(transport, Endpoint(f"https://localhost:{server.port}"))
        assert (error.message, error.phase) == ("no connection in time", Phase.NOT_SENT)
        assert not isinstance(error, UpstreamTimeout)
        await eventually(lambda: server.open == 0)


async def test_certificate_not_trusted(make: Make, server_tls: ssl.SSLContext) -> None:
    async with serving(answering(OK), tls=server_tls) as server:
        error = await failing(make(), server.endpoint())
        assert (error.message, error.phase) == ("certificate not trusted", Phase.NOT_SENT)


async def test_certificate_of_another_host(make: Make, server_tls: ssl.SSLContext, client_tls: ssl.SSLContext) -> None:
    async with serving(answering(OK), tls=server_tls) as server:
        error = await failing(make(ssl_context=client_tls), Endpoint(f"https://127.0.0.1:{server.port}"))
        assert (error.message, error.phase) == ("certificate not trusted", Phase.NOT_SENT)


async def test_tls_to_a_server_without(make: Make, client_tls: ssl.SSLContext) -> None:
    async def script(peer: Peer) -> None:
        await peer.say(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await peer.gone()

    async with serving(script) as server:
        error = await failing(make(ssl_context=client_tls), Endpoint(f"https://localhost:{server.port}"))
        assert (error.message, error.phase) == ("TLS failed", Phase.NOT_SENT)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_broken_before_the_head_on_a_fresh_connection(transport: Transport, method: str, how: str) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.close() if how == "close" else peer.reset()

    async with serving(script) as server:
        error = await failing(transport, server.endpoint(), method)
        assert error.phase is Phase.MAYBE_SENT
        assert error.message in ("connection closed", "connection reset")
        assert len(server.requests) == 1


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_half_a_head_is_no_reason_to_repeat(transport: Transport, part: bytes) -> None:
    if part.startswith(b"HTTP/1.1 100") and not isinstance(transport, LeanTransport):
        pytest.skip("aiohttp keeps interim responses to itself; nobody sends one unasked")

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        await peer.say(part)

    async with serving(script) as server:
        await (await transport.request(server.endpoint(), "GET", "/")).read()
        error = await failing(transport, server.endpoint(), "GET")
        assert error.phase is Phase.MAYBE_SENT
        assert len(server.requests) == 2


HALF_BODIES = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf",
    "chunked": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    "in a chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\nhalf",
}


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("way", ["chunks", "read"])
@pytest.mark.parametrize("name", HALF_BODIES)
async def test_broken_in_the_body(transport: Transport, name: str, way: str, how: str) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(HALF_BODIES[name])
        await go.wait()
        peer.close() if how == "close" else peer.reset()

    async with serving(script) as server:
        endpoint = server.endpoint(CANARY)
        response = await transport.request(endpoint, "GET", "/")
        got = b""
        with pytest.raises(UpstreamError) as caught:
            if way == "read":
                go.set()
                await response.read()
            else:
                async for chunk in response.chunks():
                    got += chunk
                    go.set()
        check_discreet(caught.value, endpoint)
        assert caught.value.phase is Phase.MID_STREAM
        assert got == (b"" if way == "read" else b"half")
        assert response.whole() is None
        response.abort()


async def test_reset_while_the_body_comes_until_close(transport: Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await go.wait()
        peer.reset()

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        with pytest.raises(UpstreamError) as caught:
            async for _ in response.chunks():
                go.set()
        assert caught.value.phase is Phase.MID_STREAM


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\0\0\0\x15\x03\x01",
        b"HTTP/1.1 abc OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2, 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: -2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2x\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nok",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx-big: " + b"x" * 600_000 + b"\r\n\r\n",
    ],
)
async def test_response_that_must_not_be_believed(transport: Transport, reply: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(reply)
        await peer.gone()

    async with serving(script) as server:
        error = await failing(transport, server.endpoint())
        assert error.phase is Phase.MAYBE_SENT
        assert len(server.requests) == 1
        await eventually(lambda: server.open == 0)


async def test_bad_chunk_size(transport: Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n")
        await go.wait()
        await peer.say(b"zz\r\nok\r\n0\r\n\r\n")
        await peer.gone()

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        with pytest.raises(UpstreamError) as caught:
            async for _ in response.chunks():
                go.set()
        assert caught.value.phase is Phase.MID_STREAM
        await eventually(lambda: server.open == 0)


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.gone()


async def test_deadline_before_the_head(transport: Transport) -> None:
    async with serving(silent) as server:
        with pytest.raises(UpstreamTimeout) as caught:
            await transport.request(server.endpoint(CANARY), "POST", "/", timeout_secs=0.05)
        check_discreet(caught.value, server.endpoint())
        assert caught.value.phase is Phase.MAYBE_SENT
        await eventually(lambda: server.open == 0)


async def test_deadline_while_connecting(make: Make, client_tls: ssl.SSLContext) -> None:
    transport = make(ssl_context=client_tls)
    async with serving(Peer.gone) as server:
        endpoint = Endpoint(f"https://localhost:{server.port}", lambda: CANARY)
        with pytest.raises(UpstreamTimeout) as caught:
            await transport.request(endpoint, "POST", "/", timeout_secs=0.05)
        check_discreet(caught.value, endpoint)
        assert caught.value.phase is Phase.NOT_SENT
        await eventually(lambda: server.open == 0)


async def test_deadline_in_the_body(transport: Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(HALF_BODIES["length"])
        await peer.gone()

    async with serving(script) as server:
        response = await transport.request(server.endpoint(CANARY), "POST", "/", timeout_secs=0.3)
        with pytest.raises(UpstreamTimeout) as caught:
            await response.read()
        check_discreet(caught.value, server.endpoint())
        assert caught.value.phase is Phase.MID_STREAM
        await eventually(lambda: server.open == 0)


async def test_deadline_that_is_met_leaves_nothing_behind(transport: Transport) -> None:
    async with serving(answering(OK)) as server:
        for _ in range(3):
            response = await transport.request(server.endpoint(), "GET", "/", timeout_secs=PATIENCE)
            assert await response.read() == b"ok"
        assert len(server.peers) == 1


@pytest.mark.parametrize("token", ["two words", "line\r\nx: y", "tail\n", "\N{SNOWMAN}", ""])
async def test_unusable_token_is_not_sent(transport: Transport, token: str) -> None:
    async with serving(answering(OK)) as server:
        with pytest.raises(UpstreamError) as caught:
            await transport.request(server.endpoint(token), "GET", "/")
        assert caught.value.phase is Phase.NOT_SENT
        assert server.peers == []


@pytest.mark.parametrize("script", [once(OK), silent], ids=["answering", "silent"])
async def test_closed_transport(transport: Transport, script: Script) -> None:
    async with serving(script) as server:
        task = asyncio.ensure_future(transport.request(server.endpoint(), "GET", "/"))
        await eventually(lambda: len(server.requests) == 1)
        await transport.close()
        await asyncio.wait([task])
        assert task.exception() is None or isinstance(task.exception(), UpstreamError)
        error = await failing(transport, server.endpoint())
        assert error.phase is Phase.NOT_SENT
        await transport.close()
        await eventually(lambda: server.open == 0)


def test_endpoint_shows_no_token() -> None:
    assert CANARY not in repr(Endpoint("http://a", lambda: CANARY))
