"""Over a whole fleet in virtual time; tests/hazards has pauses over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from proxy.replica_state import State
from tests.control.virtual_time import VirtualLoop, end
from tests.control.world import World


@pytest.fixture
def world() -> Iterator[World]:
    logging.disable(logging.CRITICAL)
    loop = VirtualLoop()
    try:
        it = World(loop, replicas=3)
        it.seconds(3)
        yield it
        it.proxy.kill()
    finally:
        end(loop)
        logging.disable(logging.NOTSET)


def outcome(world: World, what: str, query: str = "") -> str:
    task = world.switch(what, query)
    assert world.until(task.done, 60)
    return str(task.result())


@pytest.mark.parametrize(("what", "back"), [("pause", "resume"), ("sleep", "wake_up")])
def test_a_pause_that_cannot_be_written_down_is_undone(world: World, what: str, back: str) -> None:
    """Who cannot go on gets no request until it does."""
    world.disk.full = True
    world.replicas[1].fail(back, "500", times=2)
    assert outcome(world, what, "mode=keep" if what == "pause" else "") == "failed"
    fleet = world.proxy.fleet
    assert fleet.desired.pause is None and fleet.desired.asleep is None
    assert fleet.replicas[1].state is State.JOINING
    assert [world.replicas[n].alive.paused for n in (0, 2)] == [None, None]
    assert world.replicas[1].alive.paused is not None
    assert set(fleet.routable()) == {0, 2}
    assert world.until(lambda: len(fleet.ready()) == 3, 30)
    assert world.replicas[1].alive.paused is None
    world.settle()


def test_a_pause_on_top_of_a_pause_that_fails_leaves_the_first(world: World) -> None:
    assert outcome(world, "pause", "mode=keep") == "ok"
    world.replicas[2].fail("pause", "500")
    assert outcome(world, "pause", "mode=abort") == "failed"
    assert [replica.alive.paused is not None for replica in world.replicas] == [True] * 3
    assert world.proxy.fleet.desired.pause is not None
    assert outcome(world, "resume") == "ok"
    world.settle()


def test_who_says_that_it_paused_and_did_not_is_paused_all_the_same(world: World) -> None:
    world.replicas[1].fail("pause", "no effect")
    assert outcome(world, "pause", "mode=keep") == "ok"
    assert world.until(lambda: world.replicas[1].alive.paused is not None, 10)
    assert outcome(world, "resume") == "ok"
    world.settle()


def test_who_says_that_it_resumed_and_did_not_goes_on_all_the_same(world: World) -> None:
    assert outcome(world, "pause", "mode=keep") == "ok"
    world.replicas[1].fail("resume", "no effect")
    assert outcome(world, "resume") == "ok"
    assert world.until(lambda: world.replicas[1].alive.paused is None, 10)
    world.settle()
