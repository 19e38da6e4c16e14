from __future__ import annotations

from proxy.control.desired import Adapter
from proxy.control.loading import Verdict
from proxy.control.offer import in_the_way, load_failure
from proxy.control.result import Result
from proxy.control.transaction import Phase, Said, Seat, Transaction
from proxy.errors import ReplicaAnswer
from proxy.replica_state import State
from tests.control.scene import world_of

A = Adapter("a", "/a", None, "a")


def result(*said: tuple[Said, str], conflict: bool = False) -> Result:
    seats = {Said.OK: Seat.UNDONE, Said.REFUSED: Seat.REFUSED, Said.DIED: Seat.LEFT, Said.GONE: Seat.LEFT}
    verdicts = {
        index: Verdict(what, ReplicaAnswer(index, None, message), conflict=conflict and what is Said.REFUSED)
        for index, (what, message) in enumerate(said)
    }
    table = {index: seats[what] for index, (what, _) in enumerate(said)} | {len(said): Seat.WAITING}
    return Result(Transaction(tuple(table), phase=Phase.FAILED, seats=table), verdicts, {})


def test_words_for_two_failures() -> None:
    poison = load_failure(A, result((Said.DIED, "died")))
    assert poison is not None and "was not offered to the others" in poison.message
    assert [answer.message for answer in poison.answers] == ["died", "not asked"]
    late = load_failure(A, result((Said.OK, ""), (Said.REFUSED, "not loadable within 5 s; last word: none")))
    assert late is not None and late.status == 504
    assert [answer.message for answer in late.answers][::2] == ["done, then undone", "not asked"]
    assert load_failure(A, result((Said.OK, ""), (Said.DIED, "died"))) is None
    assert load_failure(A, result((Said.REFUSED, "no"))) is None


def test_another_name_may_do() -> None:
    assert in_the_way(result((Said.OK, ""), (Said.REFUSED, "exists"), conflict=True))
    assert not in_the_way(result((Said.OK, ""), (Said.REFUSED, "no")))


def test_a_replica_that_hung_in_a_load_is_not_trusted_with_the_name() -> None:
    """It is declared dead and the others have it. When it is back it lists the name, by a load that nobody saw end."""
    with world_of(3) as world:
        replica = world.replicas[2]
        world.files.write("/a", "w1")
        replica.fail("load", "late", secs=-10.0)
        load = world.load("a", "/a")
        world.seconds(0.5)
        replica.cut = "hang"
        assert world.until(load.done, 15) and load.result() == "ok"
        assert world.proxy.fleet.replicas[2].state is State.DOWN
        assert world.until(lambda: "a" in replica.alive.listed, 15)
        unloads = replica.calls["unload"]
        replica.cut = None
        assert world.until(lambda: world.proxy.fleet.replicas[2].state is State.READY, 60)
        assert replica.calls["unload"] > unloads
        world.settle()
