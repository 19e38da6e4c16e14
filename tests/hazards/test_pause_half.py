"""A pause that works on one replica and fails on another would leave the first frozen (the public reference): undone,
so that the fleet ends uniform, and the error says who refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import Rig, quick, rig  # noqa: F401


@pytest.mark.parametrize("kind", ["500", "503", "no_effect_and_error"])
@pytest.mark.parametrize("where", [0, 1, 2])
async def test_undone(kind: str, where: int, tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it:
        if kind == "no_effect_and_error":  # it did pause, and says that it did not
            it.replicas[where].faults.add("error", "pause", status=500, effect=True)
        else:
            it.replicas[where].faults.add(kind, "pause")
        answer = await it.pause()
        assert answer.status == 502
        rows = answer.json()["error"]["replicas"]
        assert [row["replica"] for row in rows] == [0, 1, 2]
        assert [row["message"] == "done, then undone" for row in rows] == [index != where for index in range(3)]
        it.replicas[where].faults.clear()
        await it.until(lambda: not any(replica.replica.engine.paused for replica in it.replicas), "resumed")
        await it.check()


async def test_what_runs_goes_on(tmp_path: Path) -> None:
    async with rig(2, tmp_path, decode_tps=200.0) as it:
        await it.must_load("a", it.library.path(1))
        running = [asyncio.create_task(it.complete("a", n=60)) for _ in range(4)]
        await it.until(lambda: it.parts.fleet.running, "under way")
        it.replicas[1].faults.add("500", "pause", times=1)
        assert (await it.pause()).status == 502
        assert {answer.status for answer in await asyncio.gather(*running)} == {200}
        await it.check()


async def _undo_fails(it: Rig) -> None:
    it.replicas[1].faults.add("500", "pause")
    it.replicas[0].faults.add("500", "resume")
    answer = await it.pause()
    assert answer.status == 502
    assert "not undone on replica 0" in answer.json()["error"]["message"]


async def test_an_undo_that_fails_takes_the_replica_out(tmp_path: Path) -> None:
    """Until it is put right, nobody waits on a frozen engine."""
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        await _undo_fails(it)
        for _ in range(6):
            answer = await it.complete("a", it.new_prompt())
            assert answer.ok
            assert answer.headers["x-lorafleet-replica"] == "1"
        for replica in it.replicas:
            replica.faults.clear()
        await it.check()


async def test_a_replica_that_will_not_resume_is_left_out(tmp_path: Path) -> None:
    """Freezing the whole fleet again would end the run."""
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        it.replicas[1].faults.add("500", "resume")
        assert (await it.resume()).ok
        for _ in range(6):
            answer = await it.complete("a", it.new_prompt())
            assert answer.ok
            assert answer.headers["x-lorafleet-replica"] == "0"
        it.replicas[1].faults.clear()
        await it.check()


async def test_when_nobody_resumes_the_pause_stays(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        assert (await it.pause()).ok
        for replica in it.replicas:
            replica.faults.add("500", "resume")
        answer = await it.resume()
        assert answer.status == 502
        it.paused = True
        for replica in it.replicas:
            replica.faults.clear()
        await it.check()
        assert (await it.resume()).ok
        it.paused = False
        await it.check()


async def test_pauses_of_all_kinds(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        for query in ("mode=keep", "mode=wait", "mode=abort", "", "mode=keep&clear_cache=false"):
            assert (await it.pause(query)).json() == {"status": "paused"}
            it.paused = True
            await it.check()
            assert (await it.pause(query)).ok
            assert (await it.resume()).json() == {"status": "resumed"}
            assert (await it.resume()).ok
            it.paused = False
            await it.check()
        answer = await it.pause("mode=nonsense")
        assert answer.status == 400
        await it.check()


async def test_sleep_and_wake(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.ask("POST", "/sleep?level=1")).ok
        assert (await it.ask("GET", "/is_sleeping")).json() == {"is_sleeping": True}
        assert all(replica.replica.sleep_level == 1 for replica in it.replicas)
        asked = asyncio.create_task(it.complete("a"))
        await it.sims.restart(1)
        await it.until(lambda: it.replicas[1].replica.sleep_level == 1, "asleep again")
        assert not asked.done()
        assert (await it.ask("POST", "/wake_up")).ok
        assert (await asked).ok
        await it.check()


async def test_half_a_sleep_is_undone(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        inner = it.replicas[1].http.app

        async def app(scope: object, receive: object, send: object) -> None:
            if scope["path"] == "/sleep":  # type: ignore[index]
                await send({"type": "http.response.start", "status": 500, "headers": []})  # type: ignore[operator]
                await send({"type": "http.response.body", "body": b"{}"})  # type: ignore[operator]
            else:
                await inner(scope, receive, send)  # type: ignore[arg-type]

        it.replicas[1].http.app = app  # type: ignore[assignment]
        assert (await it.ask("POST", "/sleep?level=1")).status == 502
        await it.check()
        assert [replica.replica.sleep_level for replica in it.replicas] == [0, 0]
