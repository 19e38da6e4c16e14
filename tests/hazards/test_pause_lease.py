"""The trainer dies between pause and resume: frozen for good (AReaL #1160). A pause has a lease."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, Rig, quick, rig  # noqa: F401

SHORT = {"pause_lease_secs": 0.6}


async def ended(it: Rig) -> None:
    await it.until(lambda: it.parts.fleet.desired.pause is None, "resumed by the lease")
    assert "lorafleet_pause_lease_expiries_total 1" in (await it.ask("GET", "/metrics")).text
    await it.check()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
async def test_a_pause_ends_by_itself(mode: str, tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={**SHORT, "pause": mode}) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        waiting = asyncio.create_task(it.complete("a"))
        await ended(it)
        assert (await waiting).ok


async def test_also_after_a_restart_of_the_proxy(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims, state=state, options=SHORT) as it:
            assert (await it.pause()).ok
        assert all(replica.replica.engine.paused for replica in sims.replicas)
        async with rig(2, tmp_path, sims=sims, state=state, options=SHORT) as it:
            await ended(it)


async def test_the_pause_outlives_a_restart_of_the_proxy(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            assert (await it.pause()).ok
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            it.paused = True
            await it.check()
            assert (await it.resume()).ok
            it.paused = False
            await it.check()


async def test_frozen_by_somebody_that_nobody_remembers(tmp_path: Path) -> None:
    """The replicas are paused and no journal says why: they are resumed."""
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims) as it:
            assert (await it.pause()).ok
        async with rig(2, tmp_path, sims=sims) as it:
            await it.check()


async def test_a_lease_that_cannot_resume_goes_on_trying(tmp_path: Path) -> None:
    async with rig(1, tmp_path, options=SHORT) as it:
        assert (await it.pause()).ok
        it.replicas[0].faults.add("500", "resume", until_secs=2.0)
        await it.until(lambda: it.replicas[0].calls["resume"] > 2, "tried")
        await it.until(lambda: it.parts.fleet.desired.pause is None, "resumed by the lease")
        await it.check()


async def test_a_resume_in_time_ends_the_lease(tmp_path: Path) -> None:
    async with rig(1, tmp_path, options=SHORT) as it:
        assert (await it.pause()).ok
        assert (await it.resume()).ok
        await asyncio.sleep(0.9)
        assert "lorafleet_pause_lease_expiries_total 0" in (await it.ask("GET", "/metrics")).text
        await it.check()


async def test_zero_is_for_ever(tmp_path: Path) -> None:
    async with rig(1, tmp_path, options={"pause_lease_secs": 0.0}) as it:
        assert (await it.pause()).ok
        it.paused = True
        await asyncio.sleep(0.5)
        await it.check()


async def test_the_clock_of_the_machine_is_set_back(tmp_path: Path) -> None:
    """The lease is over by the loop's clock and not by the wall's: the pause must not stay for good."""
    async with rig(1, tmp_path, options={"pause_lease_secs": 1.0}) as it:
        offset = 0.0
        it.parts.plane.wall = lambda: time.time() + offset
        assert (await it.pause()).ok
        offset = -3600.0
        await asyncio.sleep(1.2)
        offset = 0.0
        await it.until(lambda: it.parts.fleet.desired.pause is None, "resumed", secs=10)
        await it.check()
