"""A name that comes back with other weights never answers from the old weights' prefix cache (vLLM #42125, #30931).

`Rig.check` asks the same prompt under every name on every replica; a simulated replica that builds on a block of other
weights gives other tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from proxy.simulator import SimFleet
from tests.faults.rig import CANARY, PROMPT, Rig, assert_weights, quick, rig, weights_of  # noqa: F401


class Blind:
    """A proxy without the mount: it sees no files."""

    def look(self, path: str) -> None:
        return None

    def fingerprint(self, path: str) -> None:
        return None


@pytest.mark.parametrize("seeds", [(1, 2), (1, 2, 1), (1, 2, 3, 2, 1), (1, 1)])
@pytest.mark.parametrize("unload", [True, False])
async def test_from_another_path(seeds: Sequence[int], unload: bool, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        for seed in seeds:
            await it.must_load("a", it.library.path(seed))
            await it.check()
            if unload:
                await it.must_unload("a")
                await it.check()


@pytest.mark.parametrize("unload", [True, False])
async def test_from_the_same_path(unload: bool, tmp_path: Path) -> None:
    """A second run in the same output directory."""
    async with rig(2, tmp_path) as it:
        path = it.library.path(1, "trl-policy-v1")
        for seed in (1, 2, 3):
            it.library.write(path, seed)
            await it.must_load("trl-policy-v1", path)
            await it.check()
            if unload:
                await it.must_unload("trl-policy-v1")


@pytest.mark.parametrize("told", [True, False])
async def test_where_the_proxy_sees_no_files(told: bool, tmp_path: Path) -> None:
    """It is told the digest, or takes each binding for new weights."""
    async with rig(2, tmp_path) as it:
        it.parts.plane.files = Blind()  # type: ignore[assignment]
        path = it.library.path(1, "v1")
        for seed in (1, 2, 1, 1):
            it.library.write(path, seed)
            more = {"digest": f"sha256:{seed:064x}"} if told else {}
            assert (await it.load("v1", path, **more)).ok
            it.names["v1"] = weights_of(path)
            await it.check()


async def test_a_name_bound_for_the_first_time_goes_upstream_as_it_is(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("trl-policy-v1", it.library.path(1))
        assert all(set(replica.replica.loras) == {"trl-policy-v1"} for replica in it.replicas)


async def test_who_is_answered_during_the_change_is_answered_by_one_of_both(tmp_path: Path) -> None:
    async with rig(2, tmp_path, decode_tps=400.0) as it:
        await it.must_load("a", it.library.path(1))
        old, new = it.names["a"], weights_of(it.library.path(2))
        early = [asyncio.create_task(it.complete("a", n=40)) for _ in range(4)]
        await it.until(lambda: it.parts.fleet.running, "under way")
        change = asyncio.create_task(it.load("a", it.library.path(2)))
        during = [asyncio.create_task(it.complete("a", n=40)) for _ in range(20)]
        assert (await change).ok
        after = [await it.complete("a", n=8) for _ in range(4)]
        for answer in await asyncio.gather(*early):
            assert_weights(answer, "a", old, PROMPT)
        for answer in after:
            assert_weights(answer, "a", new, PROMPT)
        for answer in await asyncio.gather(*during):
            try:
                assert_weights(answer, "a", old, PROMPT)
            except AssertionError:
                assert_weights(answer, "a", new, PROMPT)
        it.names["a"] = new
        await it.check()


async def _used_before(sims: SimFleet, tmp_path: Path) -> None:
    """Somebody else loads a name on the replicas, uses it and takes it off again: its blocks stay cached."""
    from proxy.upstream.lean_transport import LeanTransport
    from proxy.upstream.transport import Endpoint
    from proxy.upstream.vllm import VllmCalls
    from tests.faults.rig import Library

    transport = LeanTransport()
    calls = VllmCalls(transport)
    path = Library(tmp_path).path(77)
    for url in sims.urls:
        there = Endpoint(url, lambda: CANARY)
        assert (await calls.load(there, "a", str(path), 20)).ok
        body = f'{{"model": "a", "prompt": {PROMPT}, "max_tokens": 8, "temperature": 0}}'.encode()
        assert (await calls.post(there, "/v1/completions", 20, body)).ok
        assert (await calls.unload(there, "a", 20)).ok
    await transport.close()


@pytest.mark.parametrize("reset", ["", "500", "reset", "lost_answer", "no_effect", "garbage"])
async def test_used_before_the_proxy_came(reset: str, tmp_path: Path) -> None:
    """The first reset of the caches may fail; until one worked, no plain name is trusted."""
    async with SimFleet(2, api_key=CANARY, max_loras=5) as sims:
        await _used_before(sims, tmp_path)
        if reset:
            sims.replicas[1].faults.add(reset, "reset", times=2)
        async with rig(2, tmp_path, sims=sims) as it:
            await it.must_load("a", it.library.path(1))
            if reset != "no_effect":  # a replica that says it did what it did not cannot be found out
                await it.check()


async def test_used_before_on_a_replica_that_cannot_reset(tmp_path: Path) -> None:
    async with SimFleet(2, api_key=CANARY, max_loras=5) as sims:
        await _used_before(sims, tmp_path)
        for replica in sims.replicas:
            replica.faults.add("error", "reset", status=404)
        async with rig(2, tmp_path, sims=sims) as it:
            await it.must_load("a", it.library.path(1))
            await it.check()


async def test_listed_by_somebody_else(tmp_path: Path) -> None:
    """One replica lists the name already, with weights that nobody knows."""
    async with SimFleet(2, api_key=CANARY, max_loras=5) as sims, rig(2, tmp_path, sims=sims) as it:
        await sims.replicas[1].replica.load("a", str(it.library.path(9)))
        answer = await it.load("a", it.library.path(1))
        assert answer.ok
        it.names["a"] = weights_of(it.library.path(1))
        for replica in sims.replicas:
            assert replica.weights(it.upstream("a")) == it.names["a"]
        await it.check_answers()
