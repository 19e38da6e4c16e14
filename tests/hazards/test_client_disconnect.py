"""A client that leaves frees the engine at once, in every phase, streamed or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from proxy.control.desired import Pause
from tests.web.front import Client, each_transport, front, until  # noqa: F401
from tests.web.scripted import ANSWER, Call, Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3]}
LEAVE: list[Callable[[Client], None]] = [Client.leave, Client.reset]


def _unanswered(call: Call) -> None:
    pass


def _head_only(call: Call) -> None:
    call.stream()


def _streaming(call: Call) -> None:
    call.stream()
    call.event(text="a")


def _half_an_answer(call: Call) -> None:
    call.head(200, "content-type: application/json", "content-length: 1000")
    call.write(b'{"id":"half')


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("begin", [_unanswered, _head_only, _streaming, _half_an_answer])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_the_replica_sees_it_at_once(
    path: str, begin: Callable[[Call], None], leave: Callable[[Client], None]
) -> None:
    async def script(call: Call) -> None:
        begin(call)
        await call.hang()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post(REQUEST, path)
        call = await replica.got(1)
        began = begin in (_streaming, _half_an_answer)
        if began:
            await client.until(b"\r\n\r\n")
        leave(client)
        async with asyncio.timeout(20):
            await call.left.wait()
        await until(it.at_rest)
        await until(lambda: it.notes.outcomes)
        assert it.notes.departures == ["streaming" if began else "asked"]
        assert it.notes.outcomes[0].left
        assert it.fleet.replicas[0].failures == 0  # not the replica's fault
    await replica.stop()


@pytest.mark.parametrize("leave", LEAVE)
async def test_while_the_client_does_not_read(leave: Callable[[Client], None]) -> None:
    async def script(call: Call) -> None:
        call.stream()
        for _ in range(64):
            call.chunk(b"x" * 65536)
        await call.hang()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post(REQUEST)
        call = await replica.got(1)
        await client.until(b"\r\n\r\n")
        leave(client)
        async with asyncio.timeout(20):
            await call.left.wait()
    await replica.stop()


@pytest.mark.parametrize("leave", LEAVE)
async def test_while_it_sends_its_body(leave: Callable[[Client], None]) -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{")
        await client.writer.drain()
        await until(lambda: it.began)
        leave(client)
        await until(lambda: it.notes.departures)
        assert it.notes.departures == ["body"]
        assert not replica.calls
    await replica.stop()


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("why", ["paused", "nobody ready"])
async def test_while_it_waits_at_the_gate(why: str, leave: Callable[[Client], None]) -> None:
    replica = await Scripted().start()
    async with front([replica.url], ready=why == "paused") as it:
        if why == "paused":
            it.commit(it.fleet.desired.with_pause(Pause("mode=keep", 0.0)))
        client = await Client.connect(it)
        client.post(REQUEST)
        await until(lambda: it.notes.now_waiting == 1)
        leave(client)
        await until(it.at_rest)
        assert it.notes.now_waiting == 0
        it.ready()
        it.commit(it.fleet.desired.with_pause(None))
        assert it.notes.departures == ["waiting"]
        assert not replica.calls
    await replica.stop()


async def test_a_body_in_two_pieces_is_no_departure() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{")
        await client.writer.drain()
        await until(lambda: it.began)
        client.send(b" " * 99999)
        assert b" 200 " in await client.until(b"\r\n\r\n")
        client.leave()
    assert len(replica.calls[0].body) == 100000
    await replica.stop()


async def test_the_next_request_on_the_same_connection_is_no_departure() -> None:
    """A pipelining client is served one after the other."""
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def script(call: Call) -> None:
        if len(replica.calls) == 1:
            await first
        call.answer({**ANSWER, "id": str(len(replica.calls))})

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post(REQUEST)
        client.post(REQUEST)
        await replica.got(1)
        first.set_result(None)
        answers = await client.until(b'"id":"2"')
        assert answers.count(b"HTTP/1.1 200") == 2
        assert not it.notes.departures
        client.leave()
    await replica.stop()


async def test_an_answer_that_is_whole_is_no_departure() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        for _ in range(20):
            client = await Client.connect(it)
            client.post(REQUEST)
            await client.until(b"}}}")
            client.reset()
        await until(lambda: len(it.notes.outcomes) == 20)
        assert not any(outcome.left for outcome in it.notes.outcomes)
    await replica.stop()
