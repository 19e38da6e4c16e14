"""Whoever stops waiting closes the connection, at once, in every phase; nothing is leaked."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Callable

import pytest

from proxy.errors import UpstreamError
from proxy.upstream.transport import Endpoint, Transport

from .conftest import Make
from .scripted import OK, Peer, Script, answering, descriptors, eventually, serving

HALF = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
HALF_CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def saying(*pieces: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*pieces)
        await peer.gone()

    return script


async def test_while_connecting(make: Make, client_tls: ssl.SSLContext) -> None:
    transport = make(ssl_context=client_tls)
    async with serving(Peer.gone) as server:
        endpoint = Endpoint(f"https://localhost:{server.port}")
        task = asyncio.ensure_future(transport.request(endpoint, "GET", "/"))
        await eventually(lambda: server.open == 1)
        await cancelled(task)
        await eventually(lambda: server.open == 0)


async def test_while_sending(transport: Transport) -> None:
    """The replica has read a part of the body and hangs: what is still buffered must not keep the connection."""
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        heads.append(peer)
        await go.wait()
        await peer.gone()

    heads: list[Peer] = []
    async with serving(script) as server:
        before = descriptors()
        task = asyncio.ensure_future(transport.request(server.endpoint(), "POST", "/", body=b"x" * 50_000_000))
        await eventually(lambda: len(heads) == 1)
        await cancelled(task)
        await eventually(lambda: descriptors() <= before + 1)  # the server's end; ours is closed though it read nothing
        go.set()
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize("reused", [False, True], ids=["fresh", "reused"])
async def test_while_waiting_for_the_head(transport: Transport, reused: bool) -> None:
    async def script(peer: Peer) -> None:
        if reused:
            await peer.request()
            await peer.say(OK)
        await peer.request()
        await peer.gone()

    async with serving(script) as server:
        if reused:
            await (await transport.request(server.endpoint(), "GET", "/")).read()
        task = asyncio.ensure_future(transport.request(server.endpoint(), "POST", "/", body=b"{}"))
        await eventually(lambda: len(server.requests) == 1 + reused)
        await cancelled(task)
        await eventually(lambda: server.open == 0)
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    "reply", [HALF, HALF_CHUNKED, b"HTTP/1.1 200 OK\r\n\r\nhalf"], ids=["length", "chunked", "eof"]
)
@pytest.mark.parametrize("way", ["chunks", "read"])
async def test_in_the_body(transport: Transport, way: str, reply: bytes) -> None:
    got: list[bytes] = []

    async def reading() -> None:
        response = await transport.request(server.endpoint(), "GET", "/")
        if way == "read":
            got.append(b"")
            await response.read()
        async for chunk in response.chunks():
            got.append(chunk)  # noqa: PERF401 - seen while it grows

    async with serving(saying(reply)) as server:
        task = asyncio.ensure_future(reading())
        await eventually(lambda: len(got) == 1)
        await asyncio.sleep(0)
        await cancelled(task)
        await eventually(lambda: server.open == 0)


@pytest.mark.parametrize("reply", [HALF, HALF_CHUNKED], ids=["length", "chunked"])
@pytest.mark.parametrize("phase", ["after the head", "after a chunk"])
async def test_abort(transport: Transport, phase: str, reply: bytes) -> None:
    async with serving(saying(reply)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        if phase == "after a chunk":
            async for chunk in response.chunks():
                assert chunk == b"half"
                break
        response.abort()
        await eventually(lambda: server.open == 0)
        response.abort()
        with pytest.raises(UpstreamError):
            await response.read()


async def test_abort_while_another_task_reads(transport: Transport) -> None:
    async def reading() -> None:
        async for _ in response.chunks():
            started.set()

    started = asyncio.Event()
    async with serving(saying(HALF)) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        task = asyncio.ensure_future(reading())
        await started.wait()
        await asyncio.sleep(0)
        response.abort()
        with pytest.raises(UpstreamError):
            await task
        await eventually(lambda: server.open == 0)


async def test_abort_while_the_replica_is_slowed_down(transport: Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                await peer.say(b"x" * 65_536)

    async with serving(script) as server:
        response = await transport.request(server.endpoint(), "GET", "/")
        await asyncio.sleep(0.05)
        response.abort()
        await eventually(lambda: server.open == 0)


async def test_cancelled_just_as_the_answer_arrives(transport: Transport) -> None:
    """Whatever the order of events, the connection is either clean and kept, or closed."""
    async with serving(answering(OK)) as server:
        for turns in range(60):
            task = asyncio.ensure_future(transport.request(server.endpoint(), "POST", "/", body=b"{}"))
            for _ in range(turns % 30):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).read()
            response = await transport.request(server.endpoint(), "GET", "/")
            assert await response.read() == b"ok"
        await transport.close()
        await eventually(lambda: server.open == 0)


def random_replica(dice: random.Random) -> Script:
    async def script(peer: Peer) -> None:
        while True:
            seen = await peer.request()
            await asyncio.sleep(dice.random() * 0.01)
            size = len(seen.body)
            await peer.say(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            for start in range(0, size, 20_000):
                piece = seen.body[start : start + 20_000]
                await peer.say(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(dice.random() * 0.002)
            await peer.say(b"0\r\n\r\n")

    return script


def ways_to_leave(dice: random.Random) -> Callable[[], float | None]:
    """Seconds after which a client leaves; None: it stays."""
    return lambda: dice.random() * 0.02 if dice.random() < 0.5 else None


async def test_two_hundred_at_once_with_random_cancels(transport: Transport) -> None:
    dice = random.Random(7)
    leave_after = ways_to_leave(dice)
    outcomes: list[bool] = []

    async def one(number: int) -> None:
        body = b"%d " % number * dice.randrange(1, 20_000)
        patience = leave_after()
        try:
            async with asyncio.timeout(patience):
                response = await transport.request(server.endpoint(), "POST", "/", body=body)
                try:
                    got = b"".join([chunk async for chunk in response.chunks()])
                finally:
                    response.abort()
        except TimeoutError:
            outcomes.append(False)
            return
        assert got == body
        outcomes.append(True)

    async with serving(random_replica(dice)) as server:
        before = descriptors()
        for _ in range(2):
            await asyncio.gather(*(one(number) for number in range(200)))
        assert len(outcomes) == 400
        assert outcomes.count(True) >= 100
        await transport.close()
        await eventually(lambda: server.open == 0)
        await eventually(lambda: descriptors() <= before)
