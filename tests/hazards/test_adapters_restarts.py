"""A restarted replica has no adapters, a restarted gateway has forgotten all of them (aibrix #236, #1819, #1146): what
should be is compared with what is, and nobody serves before both are equal."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, quick, rig  # noqa: F401


@pytest.mark.parametrize("down_secs", [0.0, 0.3])
async def test_a_replica_comes_back_empty(down_secs: float, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        await it.must_load("b", it.library.path(2))
        await it.sims.restart(0, down_secs)
        for _ in range(20):
            assert (await it.complete("a", it.new_prompt())).ok
        await it.check()


async def test_the_only_replica_comes_back_empty(tmp_path: Path) -> None:
    """Completions wait for it, and none hears that its name does not exist."""
    async with rig(1, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        await it.sims.restart(0)
        answers = await asyncio.gather(*(it.complete("a", it.new_prompt()) for _ in range(20)))
        assert {answer.status for answer in answers} == {200}
        await it.check()


async def test_all_replicas_come_back_empty(tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        for index in range(3):
            it.sims.stop(index)
        await asyncio.sleep(0.05)  # idle connections are seen to be closed: a request into one may have been worked on
        waiting = [asyncio.create_task(it.complete("a", it.new_prompt())) for _ in range(6)]
        await asyncio.sleep(0.3)
        for index in range(3):
            await it.sims.start(index)
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        await it.check()


async def test_a_publish_while_one_is_down(tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        it.sims.stop(1)
        await it.must_load("b", it.library.path(2))
        await it.must_unload("a")
        assert (await it.complete("b")).ok
        await it.sims.start(1)
        await it.check()


async def test_strict_wants_everybody(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"strict": True}) as it:
        await it.must_load("a", it.library.path(1))
        it.sims.stop(1)
        await it.until(lambda: len(it.parts.fleet.ready()) == 1, "seen to be down")
        answer = await it.load("b", it.library.path(2))
        assert answer.status == 503 and "replica 1 is down" in answer.text
        await it.sims.start(1)
        await it.check()


async def test_the_proxy_comes_back(tmp_path: Path) -> None:
    """Same state directory, same replicas: same names, same weights, and nothing is loaded again."""
    state = tmp_path / "state"
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            await it.must_load("a", it.library.path(1))
            await it.must_load("b", it.library.path(2))
            await it.must_load("a", it.library.path(3))
            await it.settle()
            names, loads = it.names, [replica.calls["load"] for replica in sims.replicas]
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            it.names = names
            await it.check()
            assert [replica.calls["load"] for replica in sims.replicas] == loads


async def test_the_proxy_comes_back_without_its_journal(tmp_path: Path) -> None:
    """What all replicas hold alike is taken over."""
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims) as it:
            await it.must_load("a", it.library.path(1))
            await it.must_load("b", it.library.path(2))
            await it.must_load("b", it.library.path(3))
            await it.settle()
            names = it.names
        async with rig(2, tmp_path, sims=sims) as it:
            it.names = names
            await it.check()


async def test_the_proxy_comes_back_and_so_do_the_replicas(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with SimFleet(2, api_key=CANARY) as sims:
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            await it.must_load("a", it.library.path(1))
            await it.must_load("a", it.library.path(2))
            names = it.names
        for index in range(2):
            await sims.restart(index)
        async with rig(2, tmp_path, sims=sims, state=state) as it:
            it.names = names
            await it.check()


async def test_yesterdays_run_was_deleted(tmp_path: Path) -> None:
    """An adapter that no replica holds and that nobody can load is given up, so that today's run can begin."""
    async with rig(2, tmp_path, control={"lost_files_secs": 0.5}) as it:
        await it.must_load("old", it.library.path(1, "old"))
        shutil.rmtree(tmp_path / "old")
        for index in range(2):
            await it.sims.restart(index)
        await it.until(lambda: not it.parts.fleet.desired.adapters, "given up")
        del it.names["old"]
        await it.check()
        await it.must_load("new", it.library.path(2))
        await it.check()


async def test_one_of_two_is_gone_for_good_and_so_are_the_files(tmp_path: Path) -> None:
    async with rig(2, tmp_path, control={"lost_files_secs": 0.5}) as it:
        await it.must_load("old", it.library.path(1, "old"))
        it.sims.stop(1)
        shutil.rmtree(tmp_path / "old")
        await it.sims.restart(0)
        await it.until(lambda: not it.parts.fleet.desired.adapters, "given up")
        assert (await it.complete("base")).ok


async def test_the_same_weights_from_another_directory(tmp_path: Path) -> None:
    """The older directory is deleted; a replica that restarts takes the newer one."""
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1, "run-1"))
        await it.must_load("a", it.library.path(1, "run-2"))
        shutil.rmtree(tmp_path / "run-1")
        await it.sims.restart(1)
        await it.check()
