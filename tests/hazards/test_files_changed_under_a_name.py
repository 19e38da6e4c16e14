"""The files at a committed path are replaced while replicas hold what was there before: who restarts must not serve
other weights under the name than the others do."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.faults.rig import quick, rig, weights_of  # noqa: F401


async def test_a_restarted_replica_does_not_take_other_weights(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        path = it.library.path(1, "live")
        await it.must_load("a", path)
        it.library.write(path, 2)
        await it.sims.restart(1)
        await it.until(
            lambda: "no longer the committed ones" in (it.parts.fleet.replicas[1].last_error or ""), "refused"
        )
        for _ in range(8):
            answer = await it.complete("a", it.new_prompt())
            assert answer.headers["x-lorafleet-replica"] == "0"
        assert not it.replicas[1].replica.loras
        await it.must_load("a", path)  # published again
        await it.check()


async def test_unloading_mends_it_as_well(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        path = it.library.path(1, "live")
        await it.must_load("a", path)
        it.library.write(path, 2)
        await it.sims.restart(1)
        await it.must_unload("a")
        await it.check()


async def test_gone_while_another_replica_holds_it(tmp_path: Path) -> None:
    """It serves on from the one that holds it; the other stays out, and says why."""
    async with rig(2, tmp_path, control={"lost_files_secs": 0.3}) as it:
        path = it.library.path(1, "live")
        await it.must_load("a", path)
        shutil.rmtree(path)
        await it.sims.restart(1)
        await it.until(lambda: "No adapter found" in (it.parts.fleet.replicas[1].last_error or ""), "told")
        assert (await it.complete("a", it.new_prompt())).ok
        await it.must_load("b", it.library.path(2))
        await it.must_unload("a")
        await it.check()


async def test_a_failed_unload_is_not_undone_with_other_weights(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        path = it.library.path(1, "live")
        await it.must_load("a", path)
        it.library.write(path, 2)
        it.replicas[1].faults.add("500", "unload", times=1)
        answer = await it.unload("a")
        assert answer.status == 502
        for _ in range(8):
            said = await it.complete("a", it.new_prompt())
            assert said.ok
            assert said.headers["x-lorafleet-replica"] == "1"
        assert it.replicas[1].weights("a") == it.names["a"] != weights_of(path)
        await it.must_unload("a")
        await it.check()
