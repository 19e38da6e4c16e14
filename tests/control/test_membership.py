"""Over a whole fleet in virtual time; the stateful test has who belongs to it after crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from proxy.errors import Conflict, LorafleetError, NotFound, TransactionFailed
from proxy.replica_state import State
from tests.control.replicas import FakeReplica
from tests.control.scene import quiet_loop
from tests.control.virtual_time import VirtualLoop
from tests.control.world import World

R0, R1, R2 = (f"http://r{n}:8000" for n in range(3))


class Scene:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.world = World(loop, replicas=2)
        fresh = FakeReplica(R2, self.world.files, loop)
        self.world.replicas.append(fresh)
        self.world.proxy.calls.add(fresh)
        self.world.seconds(3)

    def do(self, what: str, *arguments: Any) -> Any:
        call: Coroutine[Any, Any, Any] = getattr(self.world.proxy.membership, what)(*arguments)
        return self.loop.run_until_complete(self.world.proxy.spawn(call))

    def states(self) -> dict[str, State]:
        return {r.endpoint.base: r.state for r in self.world.proxy.fleet.members()}

    def again(self) -> None:
        """The proxy is killed and starts again."""
        self.world.proxy.kill()
        proxy = self.world.proxy
        self.world.members, self.world.drained = {}, {}
        self.world.crash()
        assert self.world.proxy is not proxy
        self.world.seconds(3)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with quiet_loop() as loop:
        it = Scene(loop)
        yield it
        it.world.proxy.kill()


def test_it_survives_a_crash(scene: Scene) -> None:
    assert scene.do("add", R2) == 2
    scene.world.seconds(3)
    assert scene.do("drain", 1) == "draining"
    scene.do("remove", 0)
    for _ in range(2):
        scene.again()
        assert scene.states() == {R1: State.DRAINING, R2: State.READY}
    scene.do("undrain", 1)
    scene.do("add", R0)
    scene.again()
    assert scene.states() == {R0: State.READY, R1: State.READY, R2: State.READY}


def test_the_indices_are_those_of_the_command_line(scene: Scene) -> None:
    scene.do("remove", 0)
    scene.do("add", R2)
    scene.again()
    assert {r.endpoint.base: r.index for r in scene.world.proxy.fleet.members()} == {R1: 1, R2: 2}


@pytest.mark.parametrize("again", [R0, "http://R0:8000", "http://r0:8000/"][:2])
def test_one_replica_once(scene: Scene, again: str) -> None:
    with pytest.raises(Conflict, match="in the fleet already"):
        scene.do("add", again)


def test_two_adds_at_once(scene: Scene) -> None:
    membership = scene.world.proxy.membership

    async def both() -> list[Any]:
        return await asyncio.gather(membership.add(R2), membership.add(R2), return_exceptions=True)

    index, error = scene.loop.run_until_complete(scene.world.proxy.spawn(both()))
    assert index == 2 and isinstance(error, Conflict)


def test_two_drains_at_once_leave_one_that_serves(scene: Scene) -> None:
    membership = scene.world.proxy.membership

    async def both() -> list[Any]:
        return await asyncio.gather(membership.drain(0), membership.drain(1), return_exceptions=True)

    state, error = scene.loop.run_until_complete(scene.world.proxy.spawn(both()))
    assert state == "draining" and isinstance(error, Conflict)
    assert len(scene.world.proxy.fleet.ready()) == 1


@pytest.mark.parametrize("what", ["drain", "undrain", "remove"])
@pytest.mark.parametrize("index", [-1, 7, 0])
def test_who_is_not_there(scene: Scene, what: str, index: int) -> None:
    scene.do("remove", 0)
    with pytest.raises(NotFound):
        scene.do(what, index)


@pytest.mark.parametrize(("what", "argument"), [("add", R2), ("drain", 0), ("remove", 0)])
def test_a_disk_that_is_full_changes_nothing(scene: Scene, what: str, argument: Any) -> None:
    before = scene.states()
    scene.world.disk.full = True
    with pytest.raises(TransactionFailed) as failed:
        scene.do(what, argument)
    assert failed.value.status == 507
    scene.world.seconds(3)
    assert scene.states() == before
    scene.world.disk.full = False
    scene.again()
    assert scene.states() == before


def test_a_client_that_leaves_changes_nothing(scene: Scene) -> None:
    task = scene.world.proxy.spawn(scene.world.proxy.membership.add(R2))
    scene.loop.step()
    task.cancel()
    scene.world.seconds(3)
    assert scene.states()[R2] is State.READY
    scene.again()
    assert scene.states()[R2] is State.READY


def test_who_was_away_is_met_anew(scene: Scene) -> None:
    """Somebody else used it meanwhile, without a restart of its process: none of that is ever an answer of ours."""
    scene.do("add", R2)
    scene.world.seconds(3)
    assert R2 in scene.world.proxy.fleet.desired.met
    scene.do("remove", 2)
    scene.world.replica_of(R2).alive.cache["p-v1", "p0"] = "other weights"
    scene.do("add", R2)
    scene.again()  # before or after it was emptied: the journal knows
    scene.world.seconds(5)
    assert scene.states()[R2] is State.READY
    assert not scene.world.replica_of(R2).alive.cache


def test_who_stayed_keeps_its_cache_over_a_crash(scene: Scene) -> None:
    scene.do("add", R2)
    scene.world.seconds(3)
    scene.world.replica_of(R2).alive.cache["p-v1", "p0"] = "w1"
    scene.again()
    assert scene.world.replica_of(R2).alive.cache


def test_an_address_that_is_none_any_more_does_not_keep_the_proxy_down(scene: Scene) -> None:
    scene.do("add", R2)
    membership = scene.world.proxy.membership

    def refuses(url: object) -> Any:
        raise LorafleetError("no address")

    membership._make_endpoint = refuses
    scene.world.proxy.fleet.replicas[2].removed = True
    membership.restore()
    assert set(scene.states()) == {R0, R1}


def test_nothing_is_sent_to_a_replica_while_its_removal_is_written_down(scene: Scene) -> None:
    """A completion that got there would wait for ever once the fleet is paused: nobody resumes a replica that left."""
    task = scene.world.proxy.spawn(scene.world.proxy.membership.remove(0))
    for _ in range(5):
        scene.loop.step()  # no time passes: it is at the journal now
    assert not task.done()
    for _ in range(4):
        scene.world.complete("base-model", secs=0.001)
    scene.world.seconds(1)
    assert task.done() and task.exception() is None
    replica = scene.world.proxy.fleet.replicas[0]
    assert replica.removed and not replica.requests
    assert scene.world.counts["completion ok"]
