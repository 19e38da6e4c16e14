"""Whatever happens to requests, at rest nothing is in flight: no lease, no count, no load in the router, no waiter."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from proxy.control.desired import Adapter, Pause
from proxy.replica_state import Event
from proxy.simulator.embed import SimFleet
from proxy.web.observe import Outcome
from tests.web.front import Client, Front, each_transport, front, until  # noqa: F401

ADAPTERS = [Adapter("v1", "/a/v1", None, "v1"), Adapter("v2", "/a/v2", None, "v2@cccccccccccc")]
FAULTS = ["reset", "reset_body", "500", "503", "slow", "refuse", "garbage", "hang"]


async def _ask(it: Front, chance: random.Random) -> None:
    """One client: it may leave before, during or after its answer, politely or not."""
    body: dict[str, Any] = {
        "model": chance.choice(["base", "base", "v1", "v2", "nobody"]),
        "prompt": [chance.randrange(5)] * chance.choice([1, 20, 400]),
        "max_tokens": chance.choice([1, 8, 60]),
        "stream": chance.random() < 0.5,
    }
    await asyncio.sleep(chance.random() * 0.3)
    client = await Client.connect(it)
    client.post(body, chance.choice(["/v1/completions", "/v1/completions", "/tokenize"]), "connection: close")
    reading = asyncio.create_task(client.rest())
    if chance.random() < 0.5:
        await asyncio.sleep(chance.random() * 0.2)
        chance.choice([Client.leave, Client.reset])(client)
    await reading
    client.leave()


async def _stir(it: Front, sims: SimFleet, chance: random.Random, stop: asyncio.Event) -> None:
    """Replicas break and come back, the fleet is paused and resumed, names change."""
    while not stop.is_set():
        await asyncio.sleep(0.01)
        index = chance.randrange(len(sims.replicas))
        match chance.randrange(7):
            case 0:
                sims.replicas[index].cut()
            case 1:
                sims.replicas[index].faults.add(chance.choice(FAULTS), "completion", secs=0.05, times=2)
            case 2:
                it.fleet.apply(index, Event.PROBE_FAILED, "stirred")
            case 3:
                it.commit(it.fleet.desired.with_pause(Pause("mode=keep", 0.0)))
                await asyncio.sleep(0.01)
                it.commit(it.fleet.desired.with_pause(None))
            case 4:
                it.commit(it.fleet.desired.unbind("v1"))
                it.bind(ADAPTERS[0])
            case _:
                it.ready()


def _seen(outcomes: list[Outcome]) -> dict[str, bool]:
    return {
        "left": any(outcome.left for outcome in outcomes),
        "cut": any(outcome.cut for outcome in outcomes),
        "retried": any(outcome.attempts > 1 for outcome in outcomes),
        "served": any(outcome.status == 200 and not outcome.cut for outcome in outcomes),
        "refused": any(outcome.status == 404 for outcome in outcomes),
    }


@pytest.mark.parametrize("seed", range(3))
async def test_200_clients_and_everything_that_can_happen(seed: int) -> None:
    chance = random.Random(seed)
    async with SimFleet(3, prefill_tps=20_000, decode_tps=2_000) as sims, front(sims.urls, wait_ready_secs=1.0) as it:
        it.bind(*ADAPTERS)
        for sim in sims.replicas:
            for adapter in ADAPTERS:
                sim.replica.pretend_load(adapter.upstream, adapter.path)
        stop = asyncio.Event()
        stirring = asyncio.create_task(_stir(it, sims, chance, stop))
        for _ in range(20):  # mostly one round is enough to see all that can happen
            await asyncio.gather(*(_ask(it, chance) for _ in range(200)))
            if all(_seen(it.notes.outcomes).values()):
                break
        stop.set()
        await stirring
        for sim in sims.replicas:
            sim.faults.clear()
        it.ready()
        await until(it.at_rest)
        assert all(replica.in_flight == 0 for replica in it.fleet.replicas)
        assert it.fleet.running == {}
        assert it.fleet.router.counters()["in_flight"] == 0
        # The engines are at rest, too: whoever left was aborted there.
        await until(lambda: all(not sim.state()["running"] for sim in sims.replicas))
        assert all(_seen(it.notes.outcomes).values())
