"""Replicas restart every few seconds under load, versions are published meanwhile: no completion fails."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.faults.rig import Rig, assert_weights, quick, rig, weights_of  # noqa: F401

SECS = 5.0
"""How long each test goes on."""


class Clients:
    """Rollout workers: the newest version, again and again; what was answered is judged on the spot."""

    def __init__(self, it: Rig) -> None:
        self.it = it
        self.stop = False
        self.answered = 0
        self.failures: list[str] = []
        self.newest = ""

    async def work(self, worker: int) -> None:
        it, chance = self.it, random.Random(worker)
        while not self.stop:
            name = self.newest
            prompt = [chance.randrange(3, 30_000) for _ in range(40)]
            answer = await it.complete(name, prompt, n=16)
            if answer.status == 404 and name not in it.names:  # unloaded since; a trainer has moved on as well
                continue
            if not answer.ok:
                self.failures.append(f"{name}: {answer.status} {answer.text[:300]}")
                continue
            assert_weights(answer, name, it.weights_ever[name], prompt)
            self.answered += 1


async def publisher(it: Rig, clients: Clients) -> None:
    version = 1
    while not clients.stop:
        await asyncio.sleep(0.5)
        version += 1
        path = it.library.path(version)
        it.weights_ever[f"p-v{version}"] = weights_of(path)
        answer = await it.load(f"p-v{version}", path)
        if not answer.ok:  # a replica died of something else in this very moment: a trainer tries again
            assert answer.status in (502, 503), answer.text
            continue
        it.names[f"p-v{version}"] = weights_of(path)
        clients.newest = f"p-v{version}"
        for old in [name for name in it.names if int(name.removeprefix("p-v")) < version - 2]:
            if (await it.unload(old)).ok:
                del it.names[old]


@pytest.mark.parametrize("count", [2, 3])
async def test_no_failed_completion(count: int, tmp_path: Path) -> None:
    async with rig(count, tmp_path, decode_tps=500.0, options={"probe_secs": 0.3, "policy": "prefix"}) as it:
        it.weights_ever = {}
        await it.must_load("p-v1", it.library.path(1))
        it.weights_ever["p-v1"] = it.names["p-v1"]
        clients = Clients(it)
        clients.newest = "p-v1"
        work = [asyncio.create_task(clients.work(worker)) for worker in range(12)]
        work.append(asyncio.create_task(publisher(it, clients)))
        restarts, chance = 0, random.Random(count)
        loop = asyncio.get_running_loop()
        until = loop.time() + SECS
        while loop.time() < until:
            await it.until(lambda: len(it.parts.fleet.ready()) == count, "together again")
            await asyncio.sleep(0.3)
            await it.sims.restart(chance.randrange(count), chance.choice([0.0, 0.2, 0.5]))
            restarts += 1
        clients.stop = True
        await asyncio.gather(*work)
        assert not clients.failures, clients.failures[:5]
        assert restarts >= 3
        assert clients.answered > 100
        for name in await it.listed():
            it.names.setdefault(name, it.weights_ever[name])
        it.names = {name: it.names[name] for name in await it.listed()}
        await it.settle()
        await it.until(it.at_rest, "at rest")
