"""Who joins a paused fleet is paused before it serves: a restarted replica, an added one, one that was down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, quick, rig  # noqa: F401


@pytest.mark.parametrize("down_secs", [0.0, 0.4])
async def test_a_replica_restarts_under_a_pause(down_secs: float, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        it.paused = True
        waiting = asyncio.create_task(it.complete("a"))
        await it.sims.restart(1, down_secs)
        await it.until(lambda: it.replicas[1].replica.engine.paused, "paused again")
        assert not waiting.done()
        assert (await it.resume()).ok
        it.paused = False
        assert (await waiting).ok
        await it.check()


async def test_a_publish_under_a_pause_reaches_who_comes_later(tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        it.sims.stop(2)
        await it.must_load("b", it.library.path(2))
        await it.sims.start(2)
        await it.until(lambda: len(it.parts.fleet.ready()) == 3, "together")
        assert all(replica.replica.engine.paused for replica in it.replicas)
        assert (await it.resume()).ok
        await it.check()


async def test_a_replica_is_added_to_a_paused_fleet(tmp_path: Path) -> None:
    async with SimFleet(3, api_key=CANARY) as sims:
        late = sims.replicas.pop()
        try:
            async with rig(2, tmp_path, sims=sims) as it:
                await it.must_load("a", it.library.path(1))
                assert (await it.pause()).ok
                sims.replicas.append(late)
                assert (await it.ask("POST", "/fleet/replicas", {"url": late.url})).status == 201
                await it.until(lambda: len(it.parts.fleet.ready()) == 3, "together")
                assert late.replica.engine.paused
                assert late.calls["completion"] == 0
                it.paused = True
                await it.check()
                assert (await it.resume()).ok
                it.paused = False
                await it.check()
        finally:
            late.close()


async def test_a_replica_comes_back_after_the_resume(tmp_path: Path) -> None:
    """It went away paused, keeps its state, and is back when nobody else is paused."""
    async with rig(2, tmp_path) as it:
        assert (await it.pause()).ok
        it.replicas[1].refuse()
        await it.until(lambda: len(it.parts.fleet.ready()) == 1, "seen to be away")
        assert (await it.resume()).ok
        assert it.replicas[1].replica.engine.paused
        await it.sims.start(1)
        await it.check()


async def test_a_lazy_pause_freezes_nobody(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"pause": "lazy"}) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        assert (await it.ask("GET", "/is_paused")).json() == {"is_paused": True}
        await it.sims.restart(1)
        await it.settle()
        assert not any(replica.replica.engine.paused for replica in it.replicas)
        assert (await it.complete("a")).ok
        await it.must_load("b", it.library.path(2))
        assert (await it.complete("b")).ok
        assert (await it.resume()).ok
        assert sum(replica.calls["pause"] + replica.calls["resume"] for replica in it.replicas) == 0
        await it.check()


async def test_a_lazy_pause_becomes_real_when_weights_change(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"pause": "lazy"}) as it:
        assert (await it.pause()).ok
        assert (await it.ask("POST", "/sleep?level=1")).ok
        assert all(replica.calls["pause"] == 1 for replica in it.replicas)
        assert (await it.ask("POST", "/wake_up")).ok
        it.paused = True
        await it.check()
        assert (await it.resume()).ok
        it.paused = False
        await it.check()
