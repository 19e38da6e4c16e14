"""A change hangs on a replica: /health, completions and the views answer all the same, and the change ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import quick, rig  # noqa: F401

BODIES = {
    "load": ("/v1/load_lora_adapter", {"lora_name": "b"}),
    "unload": ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    "pause": ("/pause?mode=keep", None),
    "resume": ("/resume", None),
    "reset": ("/reset_prefix_cache", None),
}


@pytest.mark.parametrize("call", BODIES)
async def test_nothing_else_waits(call: str, tmp_path: Path) -> None:
    async with rig(2, tmp_path, control={"admin_timeout_secs": 30.0}, options={"load_deadline_secs": 30.0}) as it:
        await it.must_load("a", it.library.path(1))
        await it.must_load("c", it.library.path(3))
        path, body = BODIES[call]
        if call == "load":
            body = {"lora_name": "b", "lora_path": str(it.library.path(2))}
        it.replicas[1].faults.add("hang", call)
        before = it.replicas[1].calls[call]
        change = asyncio.create_task(it.ask("POST", path, body))
        await it.until(lambda: it.replicas[1].calls[call] > before, "asked")
        for _ in range(0 if call == "pause" else 6):  # who is half paused may freeze what comes
            assert (await it.complete("c", it.new_prompt())).ok
        for view in ("/health", "/v1/models", "/fleet", "/metrics", "/is_paused", "/version", "/"):
            assert (await it.ask("GET", view)).ok, view
        running = [row for row in (await it.fleet())["transactions"] if row["outcome"] == "running"]
        assert [row["kind"] for row in running] == [call]
        assert not change.done()
        it.replicas[1].faults.clear()
        it.sims.stop(1)  # the replica dies: whoever waits for it is told
        answer = await change
        assert answer.status is not None
        await it.sims.start(1)
        if call == "unload":
            del it.names["a"]
        if call == "load":
            from tests.faults.rig import weights_of

            it.names["b"] = weights_of(it.library.path(2))
        it.paused = call == "pause"
        assert answer.ok, answer.text
        await it.check()


async def test_a_replica_that_hangs_in_everything_is_given_up(tmp_path: Path) -> None:
    async with rig(2, tmp_path, control={"health_timeout_secs": 0.2}) as it:
        await it.must_load("a", it.library.path(1))
        it.replicas[1].faults.add("hang")
        await it.must_load("b", it.library.path(2))
        for _ in range(4):
            answer = await it.complete("b", it.new_prompt())
            assert answer.ok
            assert answer.headers["x-lorafleet-replica"] == "0"
        it.replicas[1].faults.clear()
        await it.check()


async def test_health_answers_when_everybody_hangs(tmp_path: Path) -> None:
    """TRL polls with a timeout of 5 s."""
    async with rig(3, tmp_path) as it:
        for replica in it.replicas:
            replica.faults.add("hang")
        for _ in range(5):
            async with asyncio.timeout(5):
                answer = await it.ask("GET", "/health")
            assert answer.json()["total"] == 3
        for replica in it.replicas:
            replica.faults.clear()
        await it.check()


async def test_ending_while_a_change_hangs(tmp_path: Path) -> None:
    async with rig(2, tmp_path, control={"admin_timeout_secs": 60.0}) as it:
        it.replicas[1].faults.add("hang", "pause")
        change = asyncio.create_task(it.pause())
        await it.until(lambda: it.replicas[1].calls["pause"], "asked")
        async with asyncio.timeout(20):
            await it.app.begin_stop()
            answer = await change
        assert answer.status == 503
