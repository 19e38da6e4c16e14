from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.errors import NotFound, TransactionFailed
from proxy.replica_state import State
from tests.control.scene import do, world_of
from tests.control.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with world_of(3) as it:
        it.files.write("/a", "w1")
        do(it, it.proxy.adapters.load("a", "/a"))
        yield it


def unload(world: World) -> str:
    return do(world, world.proxy.adapters.unload("a"))


def listing(world: World) -> list[bool]:
    return ["a" in replica.alive.listed for replica in world.replicas]


def test_off_everywhere(world: World) -> None:
    assert unload(world) == "Success: LoRA adapter 'a' removed successfully."
    assert listing(world) == [False] * 3
    with pytest.raises(NotFound):
        unload(world)


def test_put_back_when_one_refuses(world: World) -> None:
    world.replicas[1].fail("unload", "500")
    with pytest.raises(TransactionFailed) as failed:
        unload(world)
    assert [answer.message for answer in failed.value.answers] == [
        "done, then undone",
        "Internal Server Error",
        "done, then undone",
    ]
    assert listing(world) == [True] * 3
    assert world.proxy.fleet.resolve("a") is not None
    assert len(world.proxy.fleet.ready()) == 3


def test_put_back_when_it_cannot_be_written_down(world: World) -> None:
    """One cannot load it again, and does not serve until it can."""
    world.disk.full = True
    world.replicas[1].fail("load", "500", times=1)
    with pytest.raises(TransactionFailed, match="journal"):
        unload(world)
    assert listing(world) == [True, False, True]
    assert world.proxy.fleet.replicas[1].state is State.JOINING
    world.seconds(5)
    assert listing(world) == [True] * 3
    assert len(world.proxy.fleet.ready()) == 3


def test_refused_to_new_ones_at_once_and_done_when_the_last_has_ended(world: World) -> None:
    running = world.complete("a", secs=10.0)
    world.seconds(0.5)
    assert unload(world)
    assert any(listing(world))
    with pytest.raises(NotFound):
        world.proxy.fleet.resolve("a")
    assert world.until(running.done, 30) and running.result() == "ok"
    assert world.until(lambda: not any(listing(world)), 10)


def test_or_when_the_time_for_it_is_over(world: World) -> None:
    running = world.complete("a", secs=1000.0)
    world.seconds(0.5)
    unload(world)
    world.seconds(world.settings.unload_drain_secs + 3)
    assert not any(listing(world)) and not running.done()
    running.cancel()


def test_nobody_serves_and_somebody_lacks_it(world: World) -> None:
    """Its files are lost: an unload must not need them."""
    world.files.delete("/a")
    for replica in world.replicas:
        replica.crash(0.1)
    world.seconds(4)
    assert not world.proxy.fleet.ready()
    world.unload("a")
    assert world.until(lambda: len(world.proxy.fleet.ready()) == 3, 30)
