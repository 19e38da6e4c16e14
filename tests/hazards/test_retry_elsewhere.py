"""What broke before any byte came back is asked elsewhere, and no replica is asked first that just failed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from proxy.control.desired import Adapter
from proxy.replica_state import Event, State
from tests.web.front import FACTS, Front, each_transport, front, until  # noqa: F401
from tests.web.scripted import ANSWER, Call, Script, Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3]}
V1 = Adapter("v1", "/a/v1", None, "v1")


async def post(it: Front, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(it.url + "/v1/completions", json={**REQUEST, **fields})


async def _first_then(it: Front, broken: Scripted, good: Scripted) -> httpx.Response:
    """Ask until `broken` was the first choice (the router has its own mind)."""
    for attempt in range(200):
        it.ready()
        answer = await post(it, prompt=[attempt] * 40)
        if broken.calls:
            return answer
    raise AssertionError("never asked")


async def test_refused_connections_go_to_whoever_is_left() -> None:
    down = [await Scripted().start() for _ in range(3)]
    good = await Scripted().start()
    for replica in down:
        await replica.stop()
    async with front([*(replica.url for replica in down), good.url]) as it:
        for prompt in range(8):
            answer = await post(it, prompt=[prompt] * 40)
            assert (answer.status_code, answer.headers["x-lorafleet-replica"]) == (200, "3")
        assert len(good.calls) == 8
        # Ejected after its first refused connection: none is tried twice.
        assert [replica.failures for replica in it.fleet.replicas] <= [1, 1, 1, 0]
        assert it.fleet.replicas[3].state is State.READY
    await good.stop()


def _head_then_reset(call: Call) -> None:
    call.stream()
    call.reset()


async def _head_then_close(call: Call) -> None:
    """As when an engine dies that had queued the request: the head of a stream goes out before its first token."""
    call.stream()
    await call.drain()
    call.close()


@pytest.mark.parametrize("death", [Call.reset, Call.close, _head_then_reset, _head_then_close])
async def test_no_byte_came_back(death: Script) -> None:
    broken, good = await Scripted(death).start(), await Scripted().start()
    async with front([broken.url, good.url]) as it:
        answer = await _first_then(it, broken, good)
        assert (answer.status_code, answer.json()) == (200, ANSWER)
        assert answer.headers["x-lorafleet-replica"] == "1"
        assert good.calls[-1].body == broken.calls[-1].body
        assert it.fleet.replicas[0].state is State.SUSPECT
        assert [index for index, _ in it.notes.retries] == [0]
        assert it.notes.outcomes[-1].attempts == 2
    await broken.stop()
    await good.stop()


async def test_a_request_that_kills_engines_kills_two_at_most() -> None:
    replicas = [await Scripted(Call.reset).start() for _ in range(4)]
    async with front([replica.url for replica in replicas]) as it:
        answer = await post(it)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == 502
        assert "127.0.0.1" not in answer.text
    # A fresh connection that is reset is not replayed by the transport either.
    assert sorted(len(replica.calls) for replica in replicas) == [0, 0, 1, 1]
    for replica in replicas:
        await replica.stop()


async def test_a_replica_that_is_declared_dead_while_it_works() -> None:
    silent, good = await Scripted(Call.hang).start(), await Scripted().start()
    async with front([silent.url, good.url], ready=False) as it:
        it.ready(0)
        asked = asyncio.create_task(post(it))
        call = await silent.got(1)
        it.ready(1)
        it.fleet.apply(0, Event.PROBE_FAILED, "no answer")
        answer = await asked
        assert (answer.status_code, answer.headers["x-lorafleet-replica"]) == (200, "1")
        async with asyncio.timeout(20):
            await call.left.wait()
    await silent.stop()
    await good.stop()


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_that_speaks_for_a_dead_replica(status: int) -> None:
    gateway = await Scripted(lambda call: call.answer(b"<html>bad gateway", status, media="text/html")).start()
    good = await Scripted().start()
    async with front([gateway.url, good.url]) as it:
        assert (await _first_then(it, gateway, good)).status_code == 200
        assert it.fleet.replicas[0].state is State.SUSPECT
    async with front([gateway.url]) as alone:  # nobody else to ask: its answer is the answer
        answer = await post(alone)
        assert (answer.status_code, answer.text) == (status, "<html>bad gateway")
    await gateway.stop()
    await good.stop()


@pytest.mark.parametrize("status", [500, 503])
async def test_the_engines_own_error_is_the_clients(status: int) -> None:
    error = {"error": {"message": "EngineDead", "type": "x", "param": None, "code": status}}
    broken = await Scripted(lambda call: call.answer(error, status)).start()
    good = await Scripted().start()
    async with front([broken.url, good.url]) as it:
        answer = await _first_then(it, broken, good)
        assert (answer.status_code, answer.json()) == (status, error)
    await broken.stop()
    await good.stop()


async def test_a_restarted_replica_does_not_know_the_adapter() -> None:
    restarted, good = await Scripted(Call.no_such_model).start(), await Scripted().start()
    async with front([restarted.url, good.url]) as it:
        it.bind(V1)
        for prompt in range(100):
            answer = await post(it, model="v1", prompt=[prompt] * 40)
            assert answer.status_code == 200
            if restarted.calls:
                break
        assert len(restarted.calls) == 1
        assert it.fleet.replicas[0].state is State.JOINING
        assert "v1" not in it.fleet.replicas[0].holds
        assert it.fleet.replicas[0].failures == 0
    await restarted.stop()
    await good.stop()


async def test_alone_it_waits_until_the_adapter_is_back() -> None:
    replica = await Scripted(Call.no_such_model).start()
    async with front([replica.url]) as it:
        it.bind(V1)
        asked = asyncio.create_task(post(it, model="v1"))
        await until(lambda: it.notes.now_waiting == 1)
        replica.script = Call.answer
        it.fleet.held(0, "v1", "/a/v1")
        it.fleet.apply(0, Event.CAUGHT_UP)
        assert (await asked).status_code == 200
    await replica.stop()


async def test_a_name_that_is_gone_meanwhile_stays_404() -> None:
    async def script(call: Call) -> None:
        it.commit(it.fleet.desired.unbind("v1"))
        call.no_such_model()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it:
        it.bind(V1)
        assert (await post(it, model="v1")).status_code == 404
        assert it.fleet.replicas[0].state is State.READY
    await replica.stop()


async def test_the_only_replica_is_asked_again_once_it_listens() -> None:
    replica = await Scripted().start()
    await replica.stop()
    async with front([replica.url]) as it:
        asked = asyncio.create_task(post(it))
        await until(lambda: it.notes.retries)
        assert it.fleet.replicas[0].state is State.READY  # the last one is kept
        await replica.start()
        assert (await asked).status_code == 200
    await replica.stop()


async def test_patience_ends() -> None:
    replica = await Scripted().start()
    await replica.stop()
    async with front([replica.url], wait_ready_secs=0.3) as it:
        answer = await post(it)
        assert answer.status_code == 502
        assert answer.json()["error"]["message"] == "connection refused"


async def test_a_new_replica_takes_what_waits() -> None:
    replica, other = await Scripted().start(), await Scripted().start()
    await replica.stop()
    async with front([replica.url, other.url], ready=False) as it:
        it.ready(0)
        asked = asyncio.create_task(post(it))
        await until(lambda: it.notes.retries)
        it.fleet.learn(1, FACTS)
        it.fleet.apply(1, Event.CAUGHT_UP)
        assert (await asked).headers["x-lorafleet-replica"] == "1"
    await other.stop()
