"""Many ask for one name at once (dynamo #5184, #10347): equal requests share one load, others queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.rig import Rig, quick, rig, weights_of  # noqa: F401


async def committed(it: Rig) -> dict[str, str]:
    """What each name means now, by the operator's view."""
    adapters = (await it.fleet())["adapters"]
    return {row["name"]: weights_of(Path(row["path"])) for row in adapters if row["state"] == "committed"}


async def test_thirty_equal_loads_are_one(tmp_path: Path) -> None:
    async with rig(3, tmp_path, load_secs=0.1) as it:
        path = it.library.path(1)
        answers = await asyncio.gather(*(it.load("a", path) for _ in range(30)))
        assert {answer.status for answer in answers} == {200}
        assert len({answer.text for answer in answers}) == 1
        it.names["a"] = weights_of(path)
        assert [replica.calls["load"] for replica in it.replicas] == [1, 1, 1]
        assert (await it.load("a", path)).ok
        assert [replica.calls["load"] for replica in it.replicas] == [1, 1, 1]
        await it.check()


async def test_equal_loads_share_a_failure(tmp_path: Path) -> None:
    async with rig(2, tmp_path, load_secs=0.1) as it:
        it.replicas[1].faults.add("500", "load", times=1)
        answers = await asyncio.gather(*(it.load("a", it.library.path(1)) for _ in range(10)))
        assert {answer.status for answer in answers} == {502}
        await it.check()


async def test_one_name_two_weights(tmp_path: Path) -> None:
    """One after the other, in any order: one of them has it, on all replicas."""
    async with rig(2, tmp_path, load_secs=0.05) as it:
        one, two = it.library.path(1), it.library.path(2)
        answers = await asyncio.gather(*(it.load("a", path) for path in (one, two, one, two)))
        assert {answer.status for answer in answers} == {200}
        it.names = await committed(it)
        assert it.names["a"] in (weights_of(one), weights_of(two))
        await it.check()


async def test_loads_and_unloads_of_one_name(tmp_path: Path) -> None:
    async with rig(2, tmp_path, load_secs=0.02) as it:
        path = it.library.path(1)
        for _ in range(5):
            calls = [it.load("a", path), it.unload("a"), it.load("a", path), it.unload("a"), it.load("a", path)]
            answers = await asyncio.gather(*calls)
            assert {answer.status for answer in answers} <= {200, 404}
            it.names = await committed(it)
            await it.check()


async def test_many_names_at_once(tmp_path: Path) -> None:
    async with rig(2, tmp_path, max_loras=6, load_secs=0.02) as it:
        answers = await asyncio.gather(*(it.load(f"n{i}", it.library.path(i)) for i in range(10)))
        assert sorted(answer.status or 0 for answer in answers) == [200] * 6 + [409] * 4
        it.names = {f"n{i}": weights_of(it.library.path(i)) for i, answer in enumerate(answers) if answer.ok}
        await it.check()


async def test_everything_at_once(tmp_path: Path) -> None:
    """Changes of every kind in one moment: each is answered, and the fleet ends in one mind."""
    async with rig(3, tmp_path, load_secs=0.02) as it:
        paths = [it.library.path(i) for i in range(3)]
        for turn in range(4):
            calls = [
                it.load("a", paths[turn % 3]),
                it.pause(),
                it.load("b", paths[(turn + 1) % 3]),
                it.resume(),
                it.unload("a"),
                it.ask("POST", "/reset_prefix_cache"),
                it.pause("mode=abort"),
                it.load("a", paths[(turn + 2) % 3]),
                it.ask("POST", "/abort_requests", {}),
                it.resume(),
            ]
            answers = await asyncio.gather(*calls)
            assert {answer.status for answer in answers} <= {200, 404}
            it.names = await committed(it)
            it.paused = (await it.ask("GET", "/is_paused")).json()["is_paused"]
            await it.check()
            assert (await it.resume()).ok
            it.paused = False
