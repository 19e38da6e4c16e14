"""Engines have few adapter slots and evict in silence. An unload frees none (vLLM #54839, #42633), and one load too
many pushes out a version that is listed (TRL #7017): refused with the numbers, never done."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import Rig, quick, rig  # noqa: F401


def held(it: Rig) -> None:
    """Every listed version has its slot in every engine."""
    for replica in it.replicas:
        slots = {name for name, _ in replica.replica.slots.held.values()}
        listed = {it.upstream(name) for name in it.names}
        assert listed <= slots, f"evicted: {listed - slots}"


async def test_refused_with_the_numbers(tmp_path: Path) -> None:
    async with rig(2, tmp_path, max_loras=3) as it:
        for number in range(3):
            await it.must_load(f"p-v{number}", it.library.path(number))
        answer = await it.load("p-v3", it.library.path(3))
        assert answer.status == 409
        error = answer.json()["error"]
        assert error["code"] == 409
        for said in ("max_loras=3", "p-v0 (0 in flight)", "p-v2", "--max-loras 4"):
            assert said in error["message"]
        held(it)
        await it.check()
        await it.must_unload("p-v0")
        await it.must_load("p-v3", it.library.path(3))
        held(it)
        await it.check()


async def test_the_smallest_engine_counts(tmp_path: Path) -> None:
    from proxy.simulator import SimFleet
    from tests.faults.rig import CANARY

    async with SimFleet(each=[{"max_loras": 6}, {"max_loras": 2}], api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims) as it:
            await it.must_load("a", it.library.path(1))
            await it.must_load("b", it.library.path(2))
            answer = await it.load("c", it.library.path(3))
            assert answer.status == 409 and "max_loras=2" in answer.text
            await it.check()


async def test_numbers_in_flight(tmp_path: Path) -> None:
    async with rig(2, tmp_path, max_loras=2, decode_tps=50.0) as it:
        await it.must_load("a", it.library.path(1))
        await it.must_load("b", it.library.path(2))
        stop = asyncio.Event()
        running = [asyncio.create_task(it.complete("a", n=400, leave=stop)) for _ in range(3)]
        await it.until(lambda: it.parts.fleet.running.get("a") == 3, "under way")
        assert "a (3 in flight)" in (await it.load("c", it.library.path(3))).text
        stop.set()
        await asyncio.gather(*running)
        await it.check()


@pytest.mark.parametrize("pause", ["lazy", "eager"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_a_long_run_never_evicts_a_listed_version(pause: str, staleness: int, tmp_path: Path) -> None:
    """TRL's order with max_loras = max_staleness + 2: pause, load, resume, unload. The versions in use are any."""
    async with rig(2, tmp_path, max_loras=staleness + 2, options={"pause": pause}) as it:
        for version in range(1, 14):
            assert (await it.pause()).ok
            await it.must_load(f"p-v{version}", it.library.path(version))
            assert (await it.resume()).ok
            held(it)
            # Stragglers use the oldest one last, so that it is the youngest in the engine when it is unloaded.
            for name in sorted(it.names, key=lambda name: -int(name.removeprefix("p-v"))):
                for _ in it.replicas:
                    assert (await it.complete(name)).ok
            if version > staleness + 1:
                await it.must_unload(f"p-v{version - staleness - 1}")
            await it.settle()
            held(it)
        await it.check()


async def test_a_trainer_that_never_unloads_is_told(tmp_path: Path) -> None:
    """AReaL #1385: one adapter a step, none taken away, memory creeps until the engine hangs."""
    async with rig(1, tmp_path, max_loras=4) as it:
        statuses = [(await it.load(f"step-{n}", it.library.path(n))).status for n in range(8)]
        assert statuses == [200] * 4 + [409] * 4
        assert len(it.replicas[0].replica.loras) == 4


async def test_what_still_drains_keeps_its_slot(tmp_path: Path) -> None:
    """Completions run on under an unloaded version while the next ones are loaded: nobody is answered wrongly, and the
    engine does not read the unloaded one's files again (they may be gone)."""
    async with rig(1, tmp_path, max_loras=3, decode_tps=60.0) as it:
        await it.must_load("p-v1", it.library.path(1, "p-v1"))
        weights = it.names["p-v1"]
        prompt = it.new_prompt()
        running = asyncio.create_task(it.complete("p-v1", prompt, n=60))
        await it.until(lambda: it.parts.fleet.running, "under way")
        await it.must_load("p-v2", it.library.path(2))
        await it.must_unload("p-v1")
        assert (await it.complete("p-v1")).status == 404
        await it.must_load("p-v3", it.library.path(3))
        answer = await running
        from tests.faults.rig import assert_weights

        assert_weights(answer, "p-v1", weights, prompt)
        await it.check()
        assert not it.replicas[0].replica.loras.get("p-v1")
