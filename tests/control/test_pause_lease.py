from __future__ import annotations

import pytest

from tests.control.scene import world_of
from tests.control.world import SETTINGS, World

LEASE = SETTINGS.pause_lease_secs


def pause(world: World) -> None:
    task = world.switch("pause", "mode=keep")
    assert world.until(task.done, 30) and task.result() == "ok"


def paused(world: World) -> bool:
    return world.proxy.fleet.desired.pause is not None


def test_it_ends_a_pause_in_time_and_not_before() -> None:
    with world_of(2) as world:
        pause(world)
        world.seconds(LEASE - 2)
        assert paused(world)
        world.seconds(4)
        assert not paused(world)
        assert [replica.alive.paused for replica in world.replicas] == [None, None]


def test_each_pause_has_its_own() -> None:
    with world_of(2) as world:
        for _ in range(3):
            pause(world)
            world.seconds(LEASE - 5)
        assert paused(world)
        world.seconds(10)
        assert not paused(world)


def test_it_outlives_a_crash() -> None:
    with world_of(2) as world:
        pause(world)
        world.seconds(LEASE / 2)
        world.crash()
        world.seconds(LEASE / 2 - 5)
        assert paused(world)
        world.seconds(10)
        assert not paused(world)


@pytest.mark.parametrize("trouble", ["nobody is up", "disk full"])
def test_it_goes_on_trying(trouble: str) -> None:
    with world_of(2) as world:
        pause(world)
        if trouble == "disk full":
            world.disk.full = True
        else:
            for replica in world.replicas:
                replica.crash(LEASE + 60)
        world.seconds(LEASE + 40)
        assert paused(world)
        world.disk.full = False
        assert world.until(lambda: not paused(world), 90)
        world.settle()


@pytest.mark.parametrize("by", [-3600.0, -1.0, 3600.0])
def test_the_wall_clock_is_set(by: float) -> None:
    """Back: the pause is not there for ever. Forward: it ends."""
    with world_of(1) as world:
        pause(world)
        plane = world.proxy.plane
        right = plane.wall
        plane.wall = lambda: right() + by
        world.seconds(LEASE + 1)
        plane.wall = right
        world.seconds(LEASE + 5)
        assert not paused(world)


def test_none_when_it_is_switched_off() -> None:
    from dataclasses import replace

    with world_of(1, settings=replace(SETTINGS, pause_lease_secs=0.0)) as world:
        pause(world)
        world.seconds(10 * LEASE)
        assert paused(world)
