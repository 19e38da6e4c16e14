"""Over a whole fleet in virtual time; tests/hazards has loads over HTTP, the stateful test what they mean together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.errors import BadRequest, Conflict, TransactionFailed
from tests.control.files import digest_of
from tests.control.process import BASE
from tests.control.scene import do, world_of
from tests.control.world import SETTINGS, World

VERIFIED = replace(SETTINGS, verify_load=True)


def load(world: World, name: str, weights: str, path: str = "") -> Any:
    path = path or f"/{weights}"
    world.files.write(path, weights)
    return do(world, world.proxy.adapters.load(name, path))


def meaning(world: World, name: str) -> set[str]:
    upstream = world.proxy.fleet.desired.adapters[name].upstream
    return {replica.names()[upstream] for replica in world.replicas}


def listed(world: World) -> set[str]:
    return {name for replica in world.replicas for name in replica.alive.listed}


def test_a_name_means_its_weights_everywhere() -> None:
    with world_of(3) as world:
        assert load(world, "a", "w1") == "Success: LoRA adapter 'a' added successfully."
        assert meaning(world, "a") == {"w1"}
        load(world, "a", "w2")
        assert meaning(world, "a") == {"w2"}
        calls = [replica.calls["load"] for replica in world.replicas]
        load(world, "a", "w2")
        assert [replica.calls["load"] for replica in world.replicas] == calls


def test_what_somebody_else_loaded_under_the_name_is_not_used() -> None:
    with world_of(2) as world:
        world.files.write("/foreign", "w9")
        world.replicas[1].alive.load("a", "/foreign")
        load(world, "a", "w1")
        assert meaning(world, "a") == {"w1"}
        assert world.proxy.fleet.desired.adapters["a"].upstream != "a"


def test_names_that_are_always_listed_already() -> None:
    with world_of(2) as world:
        world.replicas[1].fail("load", "exists", times=99)
        with pytest.raises(TransactionFailed, match="under weights that nobody knows"):
            load(world, "a", "w1")
        world.replicas[1].faults.clear()
        world.settle()
        assert not listed(world)
        load(world, "a", "w1")
        assert meaning(world, "a") == {"w1"}


@pytest.mark.parametrize("what", ["pause", "sleep"])
def test_what_stands_still_proves_nothing(what: str) -> None:
    with world_of(2, settings=VERIFIED) as world:
        load(world, "a", "w1")
        task = world.switch(what)
        assert world.until(task.done, 30)
        began = world.loop.time()
        with pytest.raises(Conflict, match="cannot be proven"):
            load(world, "b", "w2")
        assert world.loop.time() - began < 1
        assert listed(world) == {"a"}


def test_paused_while_it_waited_for_its_files() -> None:
    with world_of(2, settings=VERIFIED) as world:
        task = world.load("a", "/late")
        world.seconds(1)
        pause = world.switch("pause", "mode=keep")
        assert world.until(pause.done, 30)
        world.files.write("/late", "w1")
        assert world.until(task.done, 30) and task.result() == "failed"
        world.oracle.forgets("a")
        assert not listed(world)
        assert not world.proxy.plane.pending


def test_proven_by_replicas_that_agree() -> None:
    with world_of(3, settings=VERIFIED) as world:
        load(world, "a", "w1")
        assert world.proxy.plane.records[0].phases[-2][0] == "verify"
        world.replicas[2].fail("load", "no effect")
        with pytest.raises(TransactionFailed, match="the probe under the new name failed"):
            load(world, "b", "w2")
        world.seconds(3)
        assert listed(world) == {"a"}


def test_files_that_change_meanwhile() -> None:
    with world_of(2) as world:
        world.files.write("/a", "w1")
        world.replicas[1].fail("load", "slow", secs=5.0)
        task = world.load("a", "/a")
        world.seconds(2)
        world.files.write("/a", "w2")
        assert world.until(task.done, 30) and task.result() == "failed"
        assert not listed(world)
        load(world, "a", "w2", "/a")
        assert meaning(world, "a") == {"w2"}
        adapter = world.proxy.fleet.desired.adapters["a"]
        assert adapter.upstream != "a" and adapter.digest == digest_of("w2")


def test_a_base_models_name() -> None:
    with world_of(1) as world:
        with pytest.raises(BadRequest):
            load(world, BASE, "w1")
