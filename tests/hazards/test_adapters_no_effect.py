"""A load that answers 200 and has no effect: the base model answers under the policy's name (ms-swift #9855, vLLM
#34186, #55193). With --verify-load it is found out and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import quick, rig  # noqa: F401

VERIFY = {"options": {"verify_load": True}}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("where", ["all", "last"])
async def test_base_answers_under_the_name(where: str, count: int, tmp_path: Path) -> None:
    async with rig(count, tmp_path, **VERIFY) as it:
        for replica in it.replicas if where == "all" else it.replicas[-1:]:
            replica.faults.add("no_effect", "load", times=1)
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 502
        assert "undone" in answer.text
        assert (await it.complete("a")).status == 404
        await it.check()
        await it.must_load("a", it.library.path(1))
        await it.check()


@pytest.mark.parametrize("where", [0, 1, 2])
async def test_one_replica_with_other_weights(where: int, tmp_path: Path) -> None:
    async with rig(3, tmp_path, **VERIFY) as it:
        it.replicas[where].faults.add("wrong_weights", "load", times=1, path=str(it.library.path(9)))
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 502 and "different weights" in answer.text
        await it.check()
        await it.must_load("a", it.library.path(1))
        await it.check()


async def test_all_b_zero_answers_as_base_and_is_right(tmp_path: Path) -> None:
    async with rig(2, tmp_path, **VERIFY) as it:
        await it.must_load("p-v0", it.library.path(5, zero_b=True))
        await it.check()


async def test_the_probe_fails(tmp_path: Path) -> None:
    async with rig(2, tmp_path, **VERIFY) as it:
        it.replicas[1].faults.add("500", "completion", times=1)
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 502 and "probe" in answer.text
        await it.check()


async def test_while_paused(tmp_path: Path) -> None:
    """TRL loads under a pause: a replica that is frozen cannot be probed, and must not make the load wait."""
    async with rig(2, tmp_path, **VERIFY) as it:
        assert (await it.pause()).ok
        it.paused = True
        answer = await it.load("a", it.library.path(1))
        assert answer.status is not None
        if answer.ok:
            from tests.faults.rig import weights_of

            it.names["a"] = weights_of(it.library.path(1))
        await it.check()
        assert (await it.resume()).ok
        it.paused = False
        await it.check()
