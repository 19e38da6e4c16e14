from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.control import edits, slots
from proxy.control.desired import Adapter, Desired
from proxy.control.room import half_loaded, make_room
from proxy.errors import Conflict
from tests.control.scene import do, world_of
from tests.control.world import World


class FakePlane:
    """`listed` in commit order, each held by the one replica; `pending` upstream names, and those that it holds."""

    def __init__(self, *listed: str, max_loras: int, pending: tuple[str, ...] = (), held: tuple[str, ...] = ()) -> None:
        desired = Desired()
        for name in listed:
            desired = desired.bind(Adapter(name, "/x", None, name))
        replica = SimpleNamespace(holds=dict.fromkeys([*listed, *held]))
        self.fleet: Any = SimpleNamespace(
            desired=desired, running=Counter[str](), max_loras=lambda: max_loras, members=lambda: [replica]
        )
        self.pending = set(pending)

    async def edit(self, line: Any) -> None:
        self.fleet.desired = edits.apply(self.fleet.desired, line)

    @property
    def names(self) -> set[str]:
        return set(self.fleet.desired.adapters)


async def room(plane: FakePlane, name: str) -> set[str]:
    await make_room(plane, name)  # type: ignore[arg-type]
    return plane.names


async def test_room_enough() -> None:
    assert await room(FakePlane("p-v1", "p-v2", max_loras=3), "p-v3") == {"p-v1", "p-v2"}
    assert await room(FakePlane("p-v1", "p-v2", max_loras=2), "p-v2") == {"p-v1", "p-v2"}


async def test_an_earlier_run_makes_room() -> None:
    assert await room(FakePlane("p-v8", "p-v9", "p-v1", max_loras=3), "p-v2") == {"p-v9", "p-v1"}


async def test_what_is_half_loaded_needs_a_slot() -> None:
    plane = FakePlane("p-v1", max_loras=2, pending=("q-v1@abc",), held=("q-v1@abc",))
    with pytest.raises(Conflict, match=r"2 of max_loras=2 slots .*q-v1 \(being loaded\)"):
        await room(plane, "p-v2")
    assert await room(plane, "q-v1") == {"p-v1"}


async def test_what_waits_for_its_files_needs_none_yet() -> None:
    assert await room(FakePlane("p-v1", max_loras=2, pending=("q-v1",)), "p-v2") == {"p-v1"}


async def test_a_name_that_is_bound_anew_frees_no_slot() -> None:
    """p-v9 is of an earlier run and half loaded again: to retire what it meant makes no room."""
    plane = FakePlane("p-v9", "p-v1", max_loras=2, pending=("p-v9@abc",), held=("p-v9@abc",))
    assert half_loaded(plane, "p-v2") == ["p-v9"]  # type: ignore[arg-type]
    with pytest.raises(Conflict):
        await room(plane, "p-v2")
    assert plane.names == {"p-v9", "p-v1"}


def test_the_refusal_counts_each_name_once() -> None:
    desired = Desired().bind(Adapter("a", "/x", None, "a"))
    said = slots.refusal(desired, "c", 2, {}, coming=("a", "b"))
    assert "2 of max_loras=2" in said and "b (being loaded)" in said and "a (being loaded)" not in said


def test_a_listed_version_is_not_pushed_out_when_its_files_have_changed() -> None:
    """Under a pause nothing can be used to keep its slot: the engine would read those files at the next use."""
    with world_of(2, max_loras=2) as world:
        for name in ("a", "b"):
            world.files.write(f"/{name}", name)
            do(world, world.proxy.adapters.load(name, f"/{name}"))
        do(world, world.proxy.adapters.unload("b"))
        completion = world.complete("a")
        assert world.until(completion.done, 10)
        ghost_is_younger(world)
        pause = world.switch("pause", "mode=keep")
        assert world.until(pause.done, 10)
        world.files.write("/c", "c")
        world.files.write("/a", "other")
        with pytest.raises(Conflict, match="evict a, whose files have changed"):
            do(world, world.proxy.adapters.load("c", "/c"))
        assert not any(replica.alive.lost_slots for replica in world.replicas)
        world.files.write("/a", "a")
        do(world, world.proxy.adapters.load("c", "/c"))


def ghost_is_younger(world: World) -> None:
    for replica in world.proxy.fleet.replicas:
        assert replica.recent is not None
        replica.recent.pop("b", None)
        replica.recent["b"] = None


def test_nor_by_what_a_replica_that_joins_lacks() -> None:
    """It waits until the fleet goes on; then its versions are used once, and a ghost goes instead."""
    with world_of(2, max_loras=2) as world:
        world.files.write("/a", "a")
        do(world, world.proxy.adapters.load("a", "/a"))
        replica, known = world.replicas[1], world.proxy.fleet.replicas[1]
        world.files.write("/x", "x")
        replica.alive.load("x", "/x")
        replica.alive.unload("x")
        known.recent = {"a": None, "x": None}
        do(world, world.proxy.membership.drain(1))
        world.files.write("/b", "b")
        do(world, world.proxy.adapters.load("b", "/b"))
        pause = world.switch("pause", "mode=keep")
        assert world.until(pause.done, 10)
        world.files.write("/a", "other")
        do(world, world.proxy.membership.undrain(1))
        world.seconds(5)
        assert "would make the engine of replica 1 evict a" in (known.last_error or "")
        assert not replica.alive.lost_slots and "b" not in replica.alive.listed
        resume = world.switch("resume")
        assert world.until(resume.done, 10)
        assert world.until(lambda: len(world.proxy.fleet.ready()) == 2, 20)
        assert replica.names() == {"a": "a", "b": "b"} and not replica.alive.lost_slots


def test_a_name_that_is_loaded_again_has_a_slot_beside_its_ghost() -> None:
    with world_of(1, max_loras=4) as world:
        world.files.write("/a", "a")
        for _ in range(2):
            do(world, world.proxy.adapters.load("a", "/a"))
            do(world, world.proxy.adapters.unload("a"))
        do(world, world.proxy.adapters.load("a", "/a"))
        recent = [name for name in world.proxy.fleet.replicas[0].recent or {} if "a" in name]
        assert len(recent) == len(world.replicas[0].alive.slots) == 3
