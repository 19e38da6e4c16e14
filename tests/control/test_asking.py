from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from proxy.control.answers import Answer, Observed
from proxy.control.asking import broadcast, look, participants, put_back, release, switch, take_off
from proxy.control.loading import Verdict
from proxy.control.transaction import Said, Seat
from proxy.errors import ReplicaAnswer, TransactionFailed, Unavailable
from proxy.replica_state import Event, State
from tests.control.scene import do, world_of
from tests.control.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with world_of(3) as it:
        yield it


def says(*words: Said) -> object:
    """A call that each replica answers so; the last word for the others."""

    async def call(index: int) -> Verdict:
        said = words[min(index, len(words) - 1)]
        return Verdict(said, ReplicaAnswer(index, None, said.value))

    return call


# -- who takes part ----------------------------------------------------------------------------------------------------


def test_those_that_may_serve(world: World) -> None:
    world.proxy.fleet.apply(1, Event.DRAIN)
    world.proxy.fleet.apply(2, Event.PROBE_FAILED)
    assert [replica.index for replica in do(world, participants(world.proxy.plane))] == [0]


def test_waits_a_little_for_one(world: World) -> None:
    for replica in world.replicas:
        replica.crash(2.0)
    world.seconds(1.5)
    assert not world.proxy.fleet.ready()
    assert do(world, participants(world.proxy.plane))


def test_nobody(world: World) -> None:
    for replica in world.replicas:
        replica.kill()
    world.seconds(3)
    with pytest.raises(Unavailable, match="nothing was changed"):
        do(world, participants(world.proxy.plane))


def test_strict(world: World) -> None:
    plane = world.proxy.plane
    plane.settings = replace(plane.settings, strict=True)
    assert len(do(world, participants(plane))) == 3
    world.replicas[1].kill()
    world.seconds(3)
    with pytest.raises(TransactionFailed) as failed:
        do(world, participants(plane))
    assert failed.value.status == 503 and "replica 1 is down" in failed.value.message
    assert [(a.replica, a.message) for a in failed.value.answers] == [
        (0, "not asked: ready"),
        (1, "not asked: down"),
        (2, "not asked: ready"),
    ]
    plane.fleet.apply(1, Event.DRAIN)
    assert len(do(world, participants(plane))) == 2


# -- all of them -------------------------------------------------------------------------------------------------------


def test_who_leaves_is_behind_when_the_others_did_it(world: World) -> None:
    fleet = world.proxy.fleet
    result = do(world, broadcast(world.proxy.plane, fleet.ready(), ask=says(Said.OK, Said.GONE, Said.OK), undo=None))
    assert result.committed and result.where(Seat.LEFT) == [1]
    assert fleet.replicas[1].state is State.JOINING


def test_who_cannot_be_put_back_does_not_serve(world: World) -> None:
    fleet = world.proxy.fleet
    result = do(
        world,
        broadcast(
            world.proxy.plane, fleet.ready(), ask=says(Said.OK, Said.REFUSED, Said.OK), undo=says(Said.DIED, Said.OK)
        ),
    )
    assert not result.committed and list(result.spoilt) == [0]
    assert fleet.replicas[0].state is State.JOINING
    assert [fleet.replicas[n].state for n in (1, 2)] == [State.READY] * 2


@pytest.mark.parametrize(("said", "asked"), [(Said.DIED, [0]), (Said.GONE, [0, 1, 2])])
def test_a_replica_that_is_declared_dead_while_it_is_waited_for(world: World, said: Said, asked: list[int]) -> None:
    fleet, calls = world.proxy.fleet, []

    async def ask(index: int) -> Verdict:
        calls.append(index)
        if index == 0:
            world.replicas[0].kill()
            await world.loop.create_future()
        return Verdict(Said.OK, ReplicaAnswer(index, 200, ""))

    result = do(
        world,
        broadcast(world.proxy.plane, fleet.ready(), ask=ask, undo=None, canary=True, died=lambda index: said),
    )
    assert calls == asked and result.committed == (said is Said.GONE)
    assert fleet.replicas[0].state is State.DOWN


def test_release_goes_on_without_those_that_will_not(world: World) -> None:
    do(world, release(world.proxy.plane, "resuming", world.proxy.fleet.ready(), says(Said.OK, Said.REFUSED, Said.OK)))
    assert world.proxy.fleet.replicas[1].state is State.JOINING
    with pytest.raises(TransactionFailed) as failed:
        do(world, release(world.proxy.plane, "resuming", world.proxy.fleet.ready(), says(Said.REFUSED)))
    assert [answer.message for answer in failed.value.answers] == ["refused"] * 2


def test_put_back(world: World) -> None:
    do(world, put_back(world.proxy.plane, [0, 1], says(Said.OK, Said.GONE)))
    assert [replica.state for replica in world.proxy.fleet.replicas] == [State.READY, State.JOINING, State.READY]


# -- one of them -------------------------------------------------------------------------------------------------------


def loaded(world: World) -> None:
    world.files.write("/a", "w1")
    task = world.load("a", "/a")
    assert world.until(task.done, 30) and task.result() == "ok"


@pytest.mark.parametrize(
    ("kind", "times", "said"),
    [
        ("lost", 1, Said.OK),
        ("reset", 2, Said.OK),
        ("reset", 3, Said.DIED),
        ("refused", 1, Said.GONE),
        ("500", 1, Said.REFUSED),
        ("garbage", 1, Said.OK),
    ],
)
def test_taking_off(world: World, kind: str, times: int, said: Said) -> None:
    loaded(world)
    world.replicas[1].fail("unload", kind, times=times)
    verdict = do(world, take_off(world.proxy.plane, 1, "a"))
    assert verdict.said is said and verdict.unsure == (said is Said.DIED)
    assert ("a" in world.proxy.fleet.replicas[1].holds) == (said is not Said.OK)
    assert not world.proxy.plane.leaving


@pytest.mark.parametrize(
    ("kind", "times", "said", "paused"),
    [
        ("lost", 1, Said.OK, True),
        ("reset", 1, Said.OK, True),
        ("reset", 2, Said.REFUSED, False),
        ("refused", 1, Said.GONE, False),
        ("503", 1, Said.REFUSED, False),
        ("crash", 1, Said.DIED, False),
    ],
)
def test_switching(world: World, kind: str, times: int, said: Said, paused: bool) -> None:
    world.replicas[1].fail("pause", kind, times=times, secs=100.0)
    verdict = do(world, switch(world.proxy.plane, 1, "/pause?mode=keep", lambda seen: seen.paused))
    assert verdict.said is said
    process = world.replicas[1].process
    assert (process is not None and process.paused is not None) == paused


def test_looking(world: World) -> None:
    plane = world.proxy.plane
    world.replicas[1].fail("models", "reset", times=3)
    assert isinstance(do(world, look(plane, 1)), Observed)
    world.replicas[1].kill()
    began = world.loop.time()
    assert isinstance(do(world, look(plane, 1)), Answer)
    assert world.loop.time() - began < 15
