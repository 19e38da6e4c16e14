"""A path that never appears, or only on some replicas: the load waits for it alone. Other loads, pause, resume and the
lease of a pause go on; what is asked for the same name waits."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from proxy.control import adapter_files
from proxy.control.adapter_files import Fingerprint, Seen
from proxy.simulator import SimFleet
from tests.faults.asgi import Answer
from tests.faults.rig import CANARY, PROMPT, Named, Rig, assert_weights, quick, rig, weights_of  # noqa: F401
from trainer_client.digest import adapter_digest

PATIENT = {"load_deadline_secs": 600.0}
SOON = 20.0


async def waiting(it: Rig, name: str, path: Path, *blind: int) -> asyncio.Task[Answer]:
    """A load that waits for its files on the `blind` replicas (only the first of which may have been asked yet)."""
    upstream = f"{name}@{adapter_digest(path).partition(':')[2][:12]}" if name in it.names else name
    for index in blind:
        it.replicas[index].faults.add("not_visible", "load", name=upstream)
    before = it.replicas[blind[0]].calls["load"]
    load = asyncio.create_task(it.load(name, path))
    await it.until(lambda: it.replicas[blind[0]].calls["load"] > before + 2, "waiting")
    return load


def appear(it: Rig) -> None:
    for replica in it.replicas:
        replica.faults.clear()


@pytest.mark.parametrize("blind", [(0, 1, 2), (2,), (0,)], ids=["nowhere", "not on the last", "not on the first"])
async def test_everything_else_goes_on(blind: tuple[int, ...], tmp_path: Path) -> None:
    async with rig(3, tmp_path, options=PATIENT) as it:
        await it.must_load("old", it.library.path(1))
        load = await waiting(it, "late", it.library.path(2), *blind)
        async with asyncio.timeout(SOON):
            assert (await it.pause()).ok
            await it.must_load("new", it.library.path(3))
            assert (await it.resume()).ok
            assert (await it.ask("POST", "/reset_prefix_cache?reset_running_requests=true")).ok
            await it.must_unload("old")
            assert (await it.complete("new", it.new_prompt())).ok
        assert not load.done()
        assert (await it.complete("late")).status == 404
        rows = [(row["name"], row["outcome"]) for row in (await it.fleet())["transactions"] if row["kind"] == "load"]
        assert ("late", "running") in rows and ("new", "committed") in rows
        appear(it)
        assert (await load).ok
        it.names["late"] = weights_of(it.library.path(2))
        await it.check()


async def test_files_that_the_proxy_sees_grow(tmp_path: Path) -> None:
    """Half a directory, seen by the proxy itself: nobody is asked and nobody waits."""
    async with rig(2, tmp_path, options=PATIENT) as it:
        path = it.library.path(2, "growing")
        weights = path / "adapter_model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[: len(whole) // 2])
        load = asyncio.create_task(it.load("late", path))
        async with asyncio.timeout(SOON):
            await it.until(lambda: it.parts.plane.records, "under way")
            assert (await it.pause()).ok
            assert (await it.resume()).ok
            await it.must_load("new", it.library.path(3))
        assert not load.done()
        weights.write_bytes(whole)
        assert (await load).ok
        it.names["late"] = weights_of(path)
        await it.check()


async def test_the_lease_of_a_pause_runs_out_meanwhile(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={**PATIENT, "pause_lease_secs": 1.0}) as it:
        assert (await it.pause()).ok
        load = await waiting(it, "late", it.library.path(2), 1)
        await it.until(lambda: it.parts.fleet.desired.pause is None, "resumed", secs=SOON)
        assert not load.done()
        appear(it)
        assert (await load).ok
        it.names["late"] = weights_of(it.library.path(2))
        await it.check()


async def test_the_same_name_waits(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options=PATIENT) as it:
        await it.must_load("a", it.library.path(1))
        load = await waiting(it, "a", it.library.path(2), 0, 1)
        unload = asyncio.create_task(it.unload("a"))
        third = asyncio.create_task(it.load("a", it.library.path(3)))
        await it.must_load("b", it.library.path(4))
        assert (await it.complete("a", it.new_prompt())).ok
        assert not (load.done() or unload.done() or third.done())
        appear(it)
        assert [answer.status for answer in (await load, await unload, await third)] == [200] * 3
        it.names["a"] = weights_of(it.library.path(3))
        await it.check()


async def test_slots_are_counted_again_when_the_files_are_there(tmp_path: Path) -> None:
    """The last slot was free when the load began, and is taken now: nobody listed is evicted."""
    async with rig(2, tmp_path, options=PATIENT, max_loras=2) as it:
        await it.must_load("a", it.library.path(1))
        load = await waiting(it, "late", it.library.path(2), 0, 1)
        await it.must_load("b", it.library.path(3))
        appear(it)
        answer = await load
        assert answer.status == 409 and "evict a listed version" in answer.text
        await it.check()


async def test_a_load_that_has_begun_holds_its_slot(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options=PATIENT, max_loras=2) as it:
        await it.must_load("a", it.library.path(1))
        load = await waiting(it, "late", it.library.path(2), 1)
        answer = await it.load("b", it.library.path(3))
        assert answer.status == 409 and "late (being loaded)" in answer.text
        appear(it)
        assert (await load).ok
        it.names["late"] = weights_of(it.library.path(2))
        await it.check()


@pytest.mark.parametrize("where", [0, 1])
async def test_a_replica_that_restarts_meanwhile_has_not_died_of_it(where: int, tmp_path: Path) -> None:
    async with rig(3, tmp_path, options=PATIENT) as it:
        await it.must_load("a", it.library.path(1))
        load = await waiting(it, "late", it.library.path(2), 0, 1, 2)
        await it.sims.restart(where)
        await it.until(lambda: len(it.parts.fleet.ready()) == 3, "back")
        appear(it)
        answer = await load
        assert answer.ok, answer.text
        it.names["late"] = weights_of(it.library.path(2))
        await it.check()


async def test_files_that_appear_late_have_a_digest_all_the_same(tmp_path: Path) -> None:
    """Nobody saw them when the load began. When others lie there later, no replica that restarts may load those."""
    async with rig(2, tmp_path, options=PATIENT) as it:
        path = tmp_path / "late"
        load = asyncio.create_task(it.load("late", path))
        await it.until(lambda: it.replicas[0].calls["load"] > 2, "asked")
        it.library.write(tmp_path / "elsewhere", 2)
        (tmp_path / "elsewhere").rename(path)
        assert (await load).ok
        it.names["late"] = weights_of(path)
        await it.check()
        assert it.parts.fleet.desired.adapters["late"].digest == adapter_digest(path)
        shutil.rmtree(path)
        it.library.write(path, 3)
        await it.sims.restart(1)
        await it.until(lambda: "no longer the committed" in (it.parts.fleet.replicas[1].last_error or ""), "kept away")
        for _ in range(4):
            answer = await it.complete("late")
            assert_weights(answer, "late", it.names["late"], PROMPT)
        await it.must_unload("late")
        await it.check()


@pytest.mark.parametrize("before", [True, False], ids=["sure", "unsure"])
async def test_bytes_that_a_replica_may_have_read_too_early(before: bool, tmp_path: Path) -> None:
    """By the files' own account they were written after a replica was asked: the load is done once more."""
    async with rig(2, tmp_path, options=PATIENT) as it:
        path = it.library.path(2)
        moment = time.time() + (-100 if before else 100)
        for file in path.iterdir():
            os.utime(file, (moment, moment))
        blind = Blind(1)
        it.parts.plane.files = blind
        await it.must_load("late", path)
        assert [replica.calls["load"] for replica in it.replicas] == [1 if before else 2] * 2
        adapter = it.parts.fleet.desired.adapters["late"]
        assert adapter.digest == adapter_digest(path) and ("@" in adapter.upstream) != before
        await it.check()


class Blind:
    """Sees nothing for a while: as many fingerprints as a load takes before it asks."""

    def __init__(self, loads: int) -> None:
        self.left = 2 * loads + 1

    def look(self, path: str) -> Seen | None:
        return adapter_files.look(path)

    def fingerprint(self, path: str) -> Fingerprint | None:
        self.left -= 1
        return adapter_files.fingerprint(path) if self.left < 0 else None


async def test_a_replica_that_joins_meanwhile_gets_it_before_it_serves_on(tmp_path: Path) -> None:
    """It was ready when the load had begun without it, and is not when the load is done, until it holds it as well."""
    async with SimFleet(3, api_key=CANARY, require_token_everywhere=True, max_loras=5) as sims:
        urls = list(sims.urls)
        async with rig(2, tmp_path, options=PATIENT, sims=Named(sims, urls[:2])) as it:
            load = await waiting(it, "late", it.library.path(2), 1)
            assert (await it.ask("POST", "/fleet/replicas", {"url": urls[2]})).status == 201
            await it.until(lambda: len(it.parts.fleet.ready()) == 3, "joined")
            sims.replicas[2].faults.add("not_visible", "load", name="late", times=5)
            sims.replicas[1].faults.clear()
            assert (await load).ok
            it.names["late"] = weights_of(it.library.path(2))
            for _ in range(6):
                answer = await it.complete("late", it.new_prompt())
                assert answer.ok
                assert sims.replicas[int(answer.headers["x-lorafleet-replica"])].weights("late") is not None
            await it.check()


async def test_ending_meanwhile(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options=PATIENT) as it:
        load = await waiting(it, "late", it.library.path(2), 1)
        async with asyncio.timeout(SOON):
            await it.app.begin_stop()
            assert (await load).status == 503
