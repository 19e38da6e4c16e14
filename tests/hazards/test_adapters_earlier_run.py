"""A fleet that outlives a run meets the next one, which numbers from v1 again: what the earlier run left makes room,
oldest first, and never while somebody is being answered from it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.rig import quick, rig  # noqa: F401


async def test_leftovers_make_room(tmp_path: Path) -> None:
    async with rig(2, tmp_path, max_loras=4) as it:
        for version in (7, 8, 9):
            await it.must_load(f"p-v{version}", it.library.path(version, f"old-v{version}"))
        for version in range(1, 6):
            await it.must_load(f"p-v{version}", it.library.path(20 + version, f"new-v{version}"))
            if version > 3:
                await it.must_unload(f"p-v{version - 3}")
            it.names = {name: it.names[name] for name in await it.listed()}
            assert f"p-v{version}" in it.names
            assert len(it.names) <= 4
            await it.check()
        assert sorted(it.names) == ["p-v3", "p-v4", "p-v5"]


async def test_the_oldest_goes_first(tmp_path: Path) -> None:
    async with rig(1, tmp_path, max_loras=3) as it:
        for version in (7, 8, 9):
            await it.must_load(f"p-v{version}", it.library.path(version))
        await it.must_load("p-v1", it.library.path(1))
        del it.names["p-v7"]
        await it.check()


async def test_another_policy_is_not_a_leftover(tmp_path: Path) -> None:
    async with rig(1, tmp_path, max_loras=2) as it:
        await it.must_load("q-v7", it.library.path(7))
        await it.must_load("other", it.library.path(8))
        assert (await it.load("p-v1", it.library.path(1))).status == 409
        await it.check()


async def test_this_run_is_not_an_earlier_one(tmp_path: Path) -> None:
    async with rig(1, tmp_path, max_loras=2) as it:
        await it.must_load("p-v1", it.library.path(1))
        await it.must_load("p-v2", it.library.path(2))
        assert (await it.load("p-v3", it.library.path(3))).status == 409
        await it.check()


async def test_not_while_it_answers(tmp_path: Path) -> None:
    async with rig(1, tmp_path, max_loras=2, decode_tps=50.0) as it:
        await it.must_load("p-v8", it.library.path(8))
        await it.must_load("p-v9", it.library.path(9))
        stop = asyncio.Event()
        running = [asyncio.create_task(it.complete(name, n=500, leave=stop)) for name in it.names]
        await it.until(lambda: len(it.parts.fleet.running) == 2, "under way")
        answer = await it.load("p-v1", it.library.path(1))
        assert answer.status == 409 and "p-v9 (1 in flight)" in answer.text
        stop.set()
        await asyncio.gather(*running)
        await it.until(it.at_rest, "at rest")
        await it.must_load("p-v1", it.library.path(1))
        del it.names["p-v8"]
        await it.check()


async def test_the_same_names_in_the_same_directory(tmp_path: Path) -> None:
    """TRL restarted with the same output directory: same names, same paths, other weights."""
    async with rig(2, tmp_path, max_loras=4) as it:
        for run in range(3):
            for version in range(1, 5):
                path = it.library.path(0, f"trl-policy-v{version}")
                it.library.write(path, 100 * run + version)
                await it.must_load(f"trl-policy-v{version}", path)
                if version > 2:
                    await it.must_unload(f"trl-policy-v{version - 2}")
            await it.check()
