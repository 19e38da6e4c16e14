"""A mount that lags: only the replicas that do not see the files yet are asked again, ever more slowly, and nobody is
asked before the client asked (a path that was asked for too early may be remembered as missing)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import quick, rig  # noqa: F401


@pytest.mark.parametrize("lagging", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
async def test_only_those_that_lag_are_asked_again(lagging: tuple[int, ...], tmp_path: Path) -> None:
    async with rig(3, tmp_path, options={"load_deadline_secs": 60.0}) as it:
        for index in lagging:
            it.replicas[index].faults.add("not_visible", "load", times=3)
        await it.must_load("a", it.library.path(1))
        calls = [replica.calls["load"] for replica in it.replicas]
        assert calls == [4 if index in lagging else 1 for index in range(3)]
        await it.check()


async def test_growing_waits(tmp_path: Path) -> None:
    """Within 2 s at most a dozen calls, the first retry soon."""
    async with rig(1, tmp_path, options={"load_deadline_secs": 2.0}) as it:
        it.replicas[0].faults.add("not_visible", "load")
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 504
        assert 2 <= it.replicas[0].calls["load"] <= 12
        it.replicas[0].faults.clear()
        await it.check()


async def test_the_error_says_how_long_and_which_replica(tmp_path: Path) -> None:
    async with rig(3, tmp_path, options={"load_deadline_secs": 0.7}) as it:
        it.replicas[2].faults.add("not_visible", "load")
        answer = await it.load("a", it.library.path(1))
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (504, 504)
        assert [(row["replica"], row["message"]) for row in error["replicas"][:2]] == [
            (0, "done, then undone"),
            (1, "done, then undone"),
        ]
        assert error["replicas"][2]["replica"] == 2 and "0.7 s" in error["replicas"][2]["message"]
        assert "0.7 s" in error["message"] and "replica 2" in error["message"] and "replica 0" not in error["message"]
        it.replicas[2].faults.clear()
        await it.check()


async def test_a_refusal_elsewhere_ends_the_wait(tmp_path: Path) -> None:
    async with rig(3, tmp_path, options={"load_deadline_secs": 3600.0}) as it:
        it.replicas[1].faults.add("not_visible", "load")
        it.replicas[2].faults.add("500", "load")
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 502
        for replica in it.replicas:
            replica.faults.clear()
        await it.check()


async def test_no_early_probe(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        it.library.path(1, "trl-policy-v1")
        await it.must_load("trl-policy-v1", tmp_path / "trl-policy-v1")
        await asyncio.sleep(0.5)
        assert [replica.calls["load"] for replica in it.replicas] == [1, 1]


async def test_everything_else_goes_on_meanwhile(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"load_deadline_secs": 60.0}) as it:
        await it.must_load("a", it.library.path(1))
        it.replicas[1].faults.add("not_visible", "load", name="b")
        change = asyncio.create_task(it.load("b", it.library.path(2)))
        await it.until(lambda: it.replicas[1].calls["load"] > 2, "waiting")
        assert (await it.complete("a", it.new_prompt())).ok
        assert (await it.complete("b")).status == 404
        assert await it.listed() == ["a"]
        assert (await it.ask("GET", "/health")).ok
        it.replicas[1].faults.clear()
        assert (await change).ok
        from tests.faults.rig import weights_of

        it.names["b"] = weights_of(it.library.path(2))
        await it.check()
