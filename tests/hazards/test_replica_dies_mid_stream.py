"""Half an answer never looks like a whole one: the client's connection is cut."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from proxy.control.desired import Adapter
from proxy.replica_state import Event
from tests.web.front import Client, each_transport, front, until  # noqa: F401
from tests.web.scripted import ANSWER, Call, Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3], "stream": True}
REBOUND = Adapter("v1", "/b/v1", None, "v1@bbbbbbbbbbbb")


def chunked(call: Call) -> None:
    call.stream()
    call.event(text="a")


def sized(call: Call) -> None:
    call.head(200, "content-type: application/json", "content-length: 500")
    call.write(b'{"text":"a"')


def until_close(call: Call) -> None:
    call.head(200, "content-type: application/json", "connection: close")
    call.write(b'{"text":"a"')


@pytest.mark.parametrize("death", [Call.reset, Call.close])
@pytest.mark.parametrize("begin", [chunked, sized])
async def test_the_client_sees_an_incomplete_answer(
    begin: Callable[[Call], None], death: Callable[[Call], None]
) -> None:
    calls: list[Call] = []

    async def script(call: Call) -> None:
        begin(call)
        calls.append(call)
        await call.hang()

    first, second = await Scripted(script).start(), await Scripted().start()
    async with front([first.url, second.url], ready=False) as it:
        it.ready(0)
        client = await Client.connect(it)
        client.post(REQUEST)
        head = await client.until(b'"text":"a"')
        it.ready(1)
        death(calls[0])
        rest = await client.rest()
        assert b" 200 " in head
        assert b"0\r\n\r\n" not in rest
        assert len(rest) < 100
        assert it.fleet.replicas[0].failures == 1
        assert not second.calls  # nothing is repeated
        assert it.notes.outcomes[0].cut
    await first.stop()
    await second.stop()


@pytest.mark.parametrize("begin", [chunked, sized])
async def test_a_client_library_raises(begin: Callable[[Call], None]) -> None:
    def script(call: Call) -> None:
        begin(call)
        call.close()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it, httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(it.url + "/v1/completions", json=REQUEST)
    await replica.stop()


@pytest.mark.parametrize("begin", [chunked, sized, until_close])
async def test_a_replica_that_is_declared_dead_ends_its_answers(begin: Callable[[Call], None]) -> None:
    """The machine is gone without a word: only the health checks notice."""

    async def script(call: Call) -> None:
        begin(call)
        await call.hang()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post(REQUEST)
        await client.until(b'"text":"a"')
        it.fleet.apply(0, Event.PROBE_FAILED, "no answer")
        assert b"0\r\n\r\n" not in await client.rest()
        await until(it.at_rest)
        assert it.notes.outcomes[0].cut
    await replica.stop()


async def test_under_a_rebound_name_too() -> None:
    def script(call: Call) -> None:
        call.stream()
        call.event(model="v1@bbbbbbbbbbbb")
        call.chunk(b'data: {"model":"v1@')
        call.close()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        it.bind(REBOUND)
        client = await Client.connect(it)
        client.post({**REQUEST, "model": "v1"})
        answer = await client.rest()
        assert b'"model":"v1"' in answer
        assert b"0\r\n\r\n" not in answer
    await replica.stop()


async def test_a_whole_answer_is_ended_properly() -> None:
    """The opposite, so that the tests above can fail."""

    def script(call: Call) -> None:
        call.stream()
        call.event(**ANSWER)
        call.end()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        client = await Client.connect(it)
        client.post(REQUEST, "/v1/completions", "connection: close")
        assert (await client.rest()).endswith(b"0\r\n\r\n")
    await replica.stop()
