"""Nobody can serve, or the fleet is paused: requests wait, in order and bounded, instead of failing for minutes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from proxy.control.desired import Adapter, Pause
from proxy.replica_state import Event
from tests.web.front import Front, front, until
from tests.web.scripted import Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3]}
PAUSE = Pause("mode=keep", 0.0)
V1 = Adapter("v1", "/a/v1", None, "v1")
V1_AGAIN = Adapter("v1", "/b/v1", None, "v1@bbbbbbbbbbbb")


async def post(it: Front, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20) as client:
        return await client.post(it.url + path, json={**REQUEST, **fields})


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_503_with_retry_after_when_patience_ends(path: str) -> None:
    async with front(["http://127.0.0.1:9"], ready=False, wait_ready_secs=0.1) as it:
        answer = await post(it, path)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_who_waits_is_served_when_a_replica_is_ready(path: str) -> None:
    replica = await Scripted().start()
    async with front([replica.url], ready=False) as it:
        asked = asyncio.create_task(post(it, path))
        await until(lambda: it.notes.now_waiting == 1)
        it.ready()
        assert (await asked).status_code == 200
    await replica.stop()


async def test_in_order_of_arrival() -> None:
    replica = await Scripted().start()
    async with front([replica.url], ready=False) as it:
        asked = []
        for number in range(12):
            asked.append(asyncio.create_task(post(it, prompt=[number])))
            await until(lambda number=number: it.notes.now_waiting == number + 1)
        it.ready()
        await asyncio.gather(*asked)
    assert [call.json()["prompt"] for call in replica.calls] == [[number] for number in range(12)]
    await replica.stop()


async def test_a_pause_holds_completions_and_nothing_else() -> None:
    replica = await Scripted().start()
    async with front([replica.url], wait_ready_secs=0.05) as it:
        it.commit(it.fleet.desired.with_pause(PAUSE))
        asked = asyncio.create_task(post(it))
        await until(lambda: it.notes.now_waiting == 1)
        assert (await post(it, "/tokenize")).status_code == 200
        await asyncio.sleep(0.1)  # longer than anybody waits for a replica
        assert not asked.done()
        it.commit(it.fleet.desired.with_pause(None))
        assert (await asked).status_code == 200
    await replica.stop()


async def test_a_lazy_pause_holds_nothing() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        it.commit(it.fleet.desired.with_pause(Pause("mode=keep", 0.0, real=False)))
        assert (await post(it)).status_code == 200
    await replica.stop()


async def test_the_queue_is_bounded() -> None:
    replica = await Scripted().start()
    async with front([replica.url], pause_queue=3) as it:
        it.commit(it.fleet.desired.with_pause(PAUSE))
        asked = [asyncio.create_task(post(it)) for _ in range(3)]
        await until(lambda: it.notes.now_waiting == 3)
        refused = await post(it)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        it.commit(it.fleet.desired.with_pause(None))
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200, 200]
    await replica.stop()


async def test_a_name_means_what_it_means_after_the_wait() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        it.bind(V1)
        it.commit(it.fleet.desired.with_pause(PAUSE))
        asked = asyncio.create_task(post(it, model="v1"))
        await until(lambda: it.notes.now_waiting == 1)
        it.bind(V1_AGAIN)
        it.commit(it.fleet.desired.with_pause(None))
        assert (await asked).status_code == 200
        assert replica.calls[0].json()["model"] == V1_AGAIN.upstream

        it.commit(it.fleet.desired.with_pause(PAUSE))
        asked = asyncio.create_task(post(it, model="v1"))
        await until(lambda: it.notes.now_waiting == 1)
        it.commit(it.fleet.desired.unbind("v1").with_pause(None))
        assert (await asked).status_code == 404
        assert len(replica.calls) == 1
    await replica.stop()


async def test_an_unknown_name_does_not_wait() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        it.commit(it.fleet.desired.with_pause(PAUSE))
        assert (await post(it, model="nobody")).status_code == 404
        it.commit(it.fleet.desired.with_pause(None))
        it.fleet.apply(0, Event.PROBE_FAILED, "x")
        assert (await post(it, model="nobody")).status_code == 404
    await replica.stop()


async def test_a_replica_under_suspicion_is_better_than_none() -> None:
    replica = await Scripted().start()
    async with front([replica.url]) as it:
        it.fleet.apply(0, Event.CALL_FAILED, "x")
        assert (await post(it)).status_code == 200
    await replica.stop()
