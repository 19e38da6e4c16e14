"""Which connections are used again, and the one replay."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from proxy.errors import Phase, UpstreamError
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Transport

from .conftest import Make
from .scripted import OK, Peer, Server, answering, eventually, serving


async def get(transport: Transport, server: Server, method: str = "GET") -> bytes:
    response = await transport.request(server.endpoint(), method, "/")
    return await response.read()


async def test_one_connection_serves_one_after_the_other(transport: Transport) -> None:
    async with serving(answering(OK)) as server:
        for _ in range(20):
            assert await get(transport, server) == b"ok"
        assert (len(server.peers), len(server.requests)) == (1, 20)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["close", "1.0"],
)
async def test_connection_that_ends_is_not_used_again(transport: Transport, reply: bytes) -> None:
    async with serving(answering(reply)) as server:
        for _ in range(3):
            assert await get(transport, server) == b"ok"
        assert len(server.peers) == 3
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize(
    "surplus",
    [b"X", OK, b"HTTP/1.1 500 Smuggled\r\ncontent-length: 3\r\n\r\nbad", b"\r\n"],
    ids=["garbage", "response", "other response", "line break"],
)
@pytest.mark.parametrize("when", ["at once", "later", "in two writes"])
@pytest.mark.parametrize(
    "reply",
    [OK, b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"],
    ids=["length", "chunked"],
)
async def test_bytes_behind_a_response_end_the_connection(make: Make, reply: bytes, when: str, surplus: bytes) -> None:
    transport = make(idle_secs=1000.0)
    lean = isinstance(transport, LeanTransport)
    if surplus == b"\r\n" and not lean:
        pytest.skip("its parser skips line breaks between responses; no response can hide in them")
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            if peer.number:
                await peer.say(reply)
            elif when == "at once":
                await peer.say(reply + surplus)
            elif when == "in two writes":
                await peer.say(reply[:-6], reply[-6:] + surplus)
            else:
                await peer.say(reply)
                await go.wait()
                await peer.say(surplus)

    async with serving(script) as server:
        with contextlib.suppress(UpstreamError):  # refused is right, too
            assert await get(transport, server) == b"ok"
        go.set()
        if lean:
            await eventually(lambda: server.open == 0)  # closed before anything else is asked
        else:
            await asyncio.sleep(0.05)  # closed when it would be used
        assert await get(transport, server) == b"ok"
        assert (len(server.peers), len(server.requests)) == (2, 2)


async def test_idle_connection_is_closed_in_time(make: Make) -> None:
    transport = make(idle_secs=0.05)
    async with serving(answering(OK)) as server:
        await asyncio.gather(*(get(transport, server) for _ in range(5)))
        await eventually(lambda: server.open == 0)
        assert await get(transport, server) == b"ok"


async def test_connection_that_the_replica_closed_while_idle(transport: Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        if peer.number == 0:
            await go.wait()

    async with serving(script) as server:
        assert await get(transport, server) == b"ok"
        go.set()
        await eventually(lambda: server.open == 0)
        assert await get(transport, server) == b"ok"
        assert len(server.requests) == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_keep_alive_race_is_replayed_once(transport: Transport, how: str, method: str) -> None:
    """The replica closes the idle connection just as the request goes out."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        if peer.number == 0:
            peer.close() if how == "close" else peer.reset()
        else:
            await peer.say(OK)

    async with serving(script) as server:
        assert await get(transport, server) == b"ok"
        assert await get(transport, server, method) == b"ok"
        assert (len(server.peers), len(server.requests)) == (2, 3)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_replay_goes_over_a_fresh_connection_and_is_the_last(transport: Transport, method: str) -> None:
    ready = asyncio.Barrier(3)

    async def script(peer: Peer) -> None:
        if peer.number < 3:  # three idle connections, each of which would break
            await peer.request()
            await ready.wait()
            await peer.say(OK)
        await peer.request()

    async with serving(script) as server:
        await asyncio.gather(*(get(transport, server) for _ in range(3)))
        with pytest.raises(UpstreamError) as caught:
            await get(transport, server, method)
        assert caught.value.phase is Phase.MAYBE_SENT
        assert (len(server.peers), len(server.requests)) == (4, 5)


async def test_replay_that_is_refused_may_have_been_sent(transport: Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        server.stop_listening()

    async with serving(script) as server:
        assert await get(transport, server) == b"ok"
        with pytest.raises(UpstreamError) as caught:
            await get(transport, server)
        assert (caught.value.message, caught.value.phase) == ("connection refused", Phase.MAYBE_SENT)
        assert (len(server.peers), len(server.requests)) == (1, 2)


async def test_early_answer_leaves_no_half_sent_request_behind(transport: Transport) -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.say(refusal)
        await peer.gone()

    async with serving(script) as server:
        for _ in range(2):
            response = await transport.request(server.endpoint(), "POST", "/", body=b"x" * 30_000_000)
            assert (response.status, await response.read()) == (413, b"no")
        assert len(server.peers) == 2
        await eventually(lambda: server.open == 0)


async def test_late_abort_does_not_hit_the_next_exchange(transport: Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        await peer.say(OK[:-1])
        await go.wait()
        await peer.say(OK[-1:])
        await peer.gone()

    async with serving(script) as server:
        first = await transport.request(server.endpoint(), "GET", "/")
        assert await first.read() == b"ok"
        second = await transport.request(server.endpoint(), "GET", "/")
        first.abort()
        first.abort()
        go.set()
        assert await second.read() == b"ok"
        assert len(server.peers) == 1


async def test_dirty_connection_is_not_given_to_anybody(transport: Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK[:-1] if peer.number == 0 else OK)
        await peer.gone()

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        response.abort()
        assert await get(transport, server) == b"ok"
        assert len(server.peers) == 2


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_what_must_not_be_sent_twice_takes_a_new_connection(transport: Transport, method: str) -> None:
    """A pooled connection that the other side has just closed would be replayed, and its caller never knew."""
    async with serving(answering(OK)) as server:
        await get(transport, server)
        for count in (2, 3):
            response = await transport.request(server.endpoint(), method, "/", fresh=True)
            assert await response.read() == b"ok"
            assert len(server.peers) == count


async def test_a_lost_answer_on_a_new_connection_is_an_error(transport: Transport) -> None:
    async def lose(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with serving(lose) as server:
        with pytest.raises(UpstreamError) as caught:
            await transport.request(server.endpoint(), "POST", "/", fresh=True)
        assert caught.value.phase is Phase.MAYBE_SENT
        assert len(server.peers) == 1
