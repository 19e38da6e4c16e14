"""Completions that arrive while the fleet is paused wait at the proxy: bounded, in vain for nobody, and a client that
leaves leaves nothing behind, neither here nor in an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.faults.rig import quick, rig  # noqa: F401


async def test_they_wait_here_and_are_served(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        before = [replica.calls["completion"] for replica in it.replicas]
        waiting = [asyncio.create_task(it.complete("a", it.new_prompt())) for _ in range(20)]
        await it.until(lambda: len(it.parts.forwarder.gate) == 20, "waiting")
        assert [replica.calls["completion"] for replica in it.replicas] == before
        assert (await it.resume()).ok
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        await it.check()


async def test_who_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with rig(2, tmp_path, decode_tps=100.0) as it:
        await it.must_load("a", it.library.path(1))
        stop = asyncio.Event()
        frozen = [asyncio.create_task(it.complete("a", n=500, leave=stop)) for _ in range(4)]
        await it.until(lambda: sum(it.parts.fleet.running.values()) == 4, "under way")
        assert (await it.pause()).ok
        waiting = [asyncio.create_task(it.complete("a", leave=stop)) for _ in range(4)]
        await it.until(lambda: len(it.parts.forwarder.gate) == 4, "waiting")
        stop.set()
        await asyncio.gather(*frozen, *waiting)
        await it.until(it.at_rest, "at rest")
        it.paused = True
        await it.check()
        assert (await it.resume()).ok
        it.paused = False
        await it.check()


async def test_bounded(tmp_path: Path) -> None:
    async with rig(1, tmp_path, options={"pause_queue": 5}) as it:
        assert (await it.pause()).ok
        waiting = [asyncio.create_task(it.complete("base")) for _ in range(5)]
        await it.until(lambda: len(it.parts.forwarder.gate) == 5, "waiting")
        answer = await it.complete("base")
        assert answer.status == 503
        assert "retry-after" in answer.headers
        assert (await it.resume()).ok
        assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
        await it.check()


async def test_a_name_that_is_unloaded_meanwhile(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        assert (await it.pause()).ok
        waiting = asyncio.create_task(it.complete("a"))
        await it.until(lambda: len(it.parts.forwarder.gate) == 1, "waiting")
        await it.must_unload("a")
        assert (await it.resume()).ok
        assert (await waiting).status == 404
        await it.check()


async def test_an_abort_while_paused(tmp_path: Path) -> None:
    """/abort_requests ends what is frozen in the engines."""
    async with rig(2, tmp_path, decode_tps=100.0) as it:
        running = [asyncio.create_task(it.complete("base", it.new_prompt(), n=500)) for _ in range(4)]
        await it.until(lambda: sum(bool(r.replica.engine.running) for r in it.replicas) == 2, "under way")
        assert (await it.pause()).ok
        answer = await it.ask("POST", "/abort_requests", {})
        assert answer.json() == {"status": "aborted", "aborted": 4}
        assert {said.json()["choices"][0]["finish_reason"] for said in await asyncio.gather(*running)} == {"abort"}
        assert (await it.resume()).ok
        await it.check()
