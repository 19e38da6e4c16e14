"""An adapter that kills the engine that loads it is offered to one replica only (vLLM #11702, #4879)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import quick, rig  # noqa: F401


@pytest.mark.parametrize("death", ["crash", "restart", "hang", "reset"])
async def test_one_engine_at_most(death: str, tmp_path: Path) -> None:
    async with rig(4, tmp_path) as it:
        await it.must_load("good", it.library.path(1))
        for replica in it.replicas:
            details = {"secs": 0.3} if death == "restart" else {}
            replica.faults.add(death, "load", name="bad", **details)
        answer = await it.load("bad", it.library.path(2))
        assert answer.status in (502, 504), answer.text
        asked = [replica.calls["load"] - 1 for replica in it.replicas]
        assert asked[0] >= 1
        assert asked[1:] == [0, 0, 0]
        said = answer.json()["error"]
        assert [row["replica"] for row in said["replicas"]] == [0, 1, 2, 3]
        assert [row["message"] for row in said["replicas"][1:]] == ["not asked"] * 3
        if death != "reset":
            assert "died" in said["message"] or "within" in said["message"]
        for replica in it.replicas:
            replica.faults.clear()
            if not replica.up and death == "crash":
                await replica.start()
        await it.check()


async def test_the_others_serve_on(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("good", it.library.path(1))
        it.replicas[0].faults.add("crash", "load", name="bad")
        assert (await it.load("bad", it.library.path(2))).status == 502
        for _ in range(6):
            answer = await it.complete("good", it.new_prompt())
            assert answer.ok
            assert answer.headers["x-lorafleet-replica"] == "1"
        await it.replicas[0].start()
        await it.check()


async def test_a_replica_that_was_gone_before_is_no_proof(tmp_path: Path) -> None:
    """The first one refuses connections: that is not the adapter's doing, so the next one is asked."""
    async with rig(3, tmp_path) as it:
        it.replicas[0].refuse()
        await it.must_load("a", it.library.path(1))
        await it.replicas[0].start()
        await it.check()
