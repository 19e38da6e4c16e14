"""A change got no answer: what happened is read from the replica, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import quick, rig, weights_of  # noqa: F401


@pytest.mark.parametrize("kind", ["lost_answer", "reset", "garbage"])
@pytest.mark.parametrize("effect", [True, False])
async def test_load(kind: str, effect: bool, tmp_path: Path) -> None:
    """Done or not: one way or the other every replica ends with it, and no engine reads it twice for nothing."""
    async with rig(2, tmp_path) as it:
        for replica in it.replicas:
            replica.faults.add(kind, "load", times=1, effect=effect)
        answer = await it.load("a", it.library.path(1))
        assert answer.ok, answer.text
        it.names["a"] = weights_of(it.library.path(1))
        done = effect or kind == "lost_answer"
        assert [replica.calls["load"] for replica in it.replicas] == ([1, 1] if done else [2, 2])
        await it.check()


@pytest.mark.parametrize("kind", ["lost_answer", "reset", "garbage"])
@pytest.mark.parametrize("effect", [True, False])
@pytest.mark.parametrize("call", ["unload", "pause", "resume", "reset"])
async def test_others(call: str, kind: str, effect: bool, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        if call == "resume":
            assert (await it.pause()).ok
        it.replicas[0].faults.add(kind, call, times=1, effect=effect)
        asks = {"unload": lambda: it.unload("a"), "pause": it.pause, "resume": it.resume}
        ask = asks.get(call, lambda: it.ask("POST", "/reset_prefix_cache"))
        answer = await ask()
        assert answer.ok, answer.text
        if call == "unload":
            del it.names["a"]
        it.paused = call == "pause"
        await it.check()


async def test_a_lost_answer_and_no_truth_either(tmp_path: Path) -> None:
    """The answer is lost and the replica then shows nothing: taken for dead, put right when it is back."""
    async with rig(3, tmp_path) as it:
        await it.must_load("a", it.library.path(1))
        it.replicas[2].faults.add("lost_answer", "load", times=1)
        it.replicas[2].faults.add("hang", "models")
        await it.must_load("b", it.library.path(2))
        it.replicas[2].faults.clear()
        await it.check()


async def test_a_lost_undo_is_not_forgotten(tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it:
        it.replicas[0].faults.add("lost_answer", "unload")
        it.replicas[2].faults.add("500", "load", times=1)
        answer = await it.load("a", it.library.path(1))
        assert answer.status == 502
        it.replicas[0].faults.clear()
        await it.check()
        await it.must_load("a", it.library.path(2))
        await it.check()
