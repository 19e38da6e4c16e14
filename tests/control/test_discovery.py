"""A name whose addresses come and go, over a whole fleet in virtual time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.control.discovery import Follower, Group
from proxy.replica_state import State
from tests.control.replicas import FakeReplica
from tests.control.scene import quiet_loop
from tests.control.virtual_time import VirtualLoop
from tests.control.world import World

GROUP = Group("vllm", 8000)


class Scene:
    """One named replica, and a name that resolves to others."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.world = World(loop, replicas=1)
        self.world.groups = [str(GROUP)]
        self.world.crash()  # so that the journal knows the name
        self.found: list[str] | None = []
        self.follow()

    def follow(self) -> None:
        async def resolve(name: str, port: int) -> list[str]:
            assert (name, port) == ("vllm", 8000)
            if self.found is None:
                raise OSError("no such name")
            return list(self.found)

        self.follower = Follower(GROUP, self.world.proxy.membership, resolve, 5.0)
        self.world.proxy.spawn(self.follower.run())

    def machine(self, base: str) -> FakeReplica:
        replica = FakeReplica(base, self.world.files, self.loop)
        self.world.replicas.append(replica)
        self.world.proxy.calls.add(replica)
        return replica

    def states(self) -> dict[str, str]:
        return {r.endpoint.base: r.state.value for r in self.world.proxy.fleet.members()}

    def until(self, secs: float = 60, **states: str) -> None:
        wanted = {f"http://{name}:8000": state for name, state in states.items()}
        assert self.world.until(lambda: self.states() == wanted, secs), (self.states(), wanted)

    def done(self, coroutine: object) -> object:
        return self.loop.run_until_complete(self.world.proxy.spawn(coroutine))  # type: ignore[arg-type]


@pytest.fixture
def scene() -> Iterator[Scene]:
    with quiet_loop() as loop:
        it = Scene(loop)
        yield it
        it.world.proxy.kill()


def test_they_come_and_go(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.machine("http://y:8000")
    scene.until(r0="ready")
    scene.found = ["http://x:8000", "http://y:8000"]
    scene.until(r0="ready", x="ready", y="ready")
    scene.found = ["http://y:8000"]
    scene.world.seconds(9)
    assert scene.states()["http://x:8000"] == "ready"  # a resolver can answer in part
    scene.until(r0="ready", y="ready")
    scene.found = None
    scene.world.seconds(60)
    assert set(scene.states()) == {"http://r0:8000", "http://y:8000"}


def test_who_comes_back_soon_was_never_away(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    index = scene.world.proxy.membership.of("http://x:8000").index
    for _ in range(5):
        scene.found = []
        scene.world.seconds(10)
        scene.found = ["http://x:8000"]
        scene.world.seconds(6)
    assert scene.world.proxy.membership.of("http://x:8000").index == index


def test_another_machine_at_the_same_address_is_somebody_else(scene: Scene) -> None:
    """It held other weights under a name of ours, and their blocks: its cache is emptied before it serves."""
    machine = scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    desired = scene.world.proxy.fleet.desired
    assert "http://x:8000" in desired.met
    scene.found = []
    scene.until(r0="ready")
    assert "http://x:8000" not in scene.world.proxy.fleet.desired.met
    machine.boot()
    machine.alive.cache["v1", "p0"] = "other weights"
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    assert not machine.alive.cache
    assert "http://x:8000" in scene.world.proxy.fleet.desired.met


def test_known_at_the_next_start_when_it_never_left(scene: Scene) -> None:
    machine = scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    machine.alive.cache["v1", "p0"] = "w1"
    resets = machine.calls["reset"]
    restart(scene)
    scene.until(r0="ready", x="ready")
    assert machine.calls["reset"] == resets and machine.alive.cache


def test_unknown_when_it_was_away_at_a_start(scene: Scene) -> None:
    machine = scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    scene.found = []
    restart(scene)
    scene.world.seconds(6)
    machine.alive.cache["v1", "p0"] = "other weights"
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    assert not machine.alive.cache


def restart(scene: Scene) -> None:
    scene.world.proxy.kill()
    scene.world.crash()
    scene.follow()


def test_what_the_operator_drained_stays_drained(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    membership = scene.world.proxy.membership
    index = membership.of("http://x:8000").index
    assert scene.done(membership.drain(index)) == "draining"
    membership.back(index)
    assert scene.states()["http://x:8000"] == "draining"
    scene.done(membership.undrain(index))
    scene.until(r0="ready", x="ready")


def test_what_the_operator_removed_stays_out_while_the_name_has_it(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    membership = scene.world.proxy.membership
    scene.done(membership.remove(membership.of("http://x:8000").index))
    scene.world.seconds(60)
    assert scene.states() == {"http://r0:8000": "ready"}
    scene.found = []
    scene.world.seconds(30)
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")


def test_what_the_operator_added_is_not_the_names(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.done(scene.world.proxy.membership.add("http://x:8000"))
    scene.found = ["http://x:8000", "http://r0:8000"]
    scene.until(r0="ready", x="ready")
    scene.found = []
    scene.world.seconds(60)
    assert scene.states() == {"http://r0:8000": "ready", "http://x:8000": "ready"}


def test_the_last_one_that_serves_stays(scene: Scene) -> None:
    scene.machine("http://x:8000")
    scene.found = ["http://x:8000"]
    scene.until(r0="ready", x="ready")
    scene.world.replicas[0].cut = "refuse"
    scene.until(r0="down", x="ready")
    scene.found = []
    scene.world.seconds(60)
    assert scene.states()["http://x:8000"] == State.READY.value
    scene.world.replicas[0].cut = None
    scene.until(r0="ready")
