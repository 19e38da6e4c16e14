from __future__ import annotations

import pytest

from proxy.errors import Unavailable
from proxy.fleet import Fleet
from proxy.lease import Served
from proxy.replica_state import Event
from proxy.routing.request import RouteRequest
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint
from proxy.web.passthrough import Errands
from tests.web.front import FACTS

NOBODY: frozenset[int] = frozenset()


def fleet() -> Fleet:
    it = Fleet([Endpoint("http://a"), Endpoint("http://b")], Router())
    for index in (0, 1):
        it.learn(index, FACTS)
        it.apply(index, Event.CAUGHT_UP)
    return it


def test_the_least_busy_replica_is_taken_and_nothing_is_counted() -> None:
    it = fleet()
    busy = it.lease(RouteRequest(model="base"), None)
    errands = Errands(it)
    errand = errands.take(Served("v1", "v1", None, adapter=True), NOBODY)
    assert errand.replica is not busy.replica
    assert (errand.replica.requests, errand.replica.running, errand.decision) == (0, {}, None)
    assert errands.running == {errand}
    errand.first_byte()
    errand.release(ok=True)
    errand.release(ok=False)
    assert not errands.running


def test_who_failed_is_left_out() -> None:
    errands = Errands(fleet())
    assert errands.take(None, frozenset({0})).replica.index == 1
    with pytest.raises(Unavailable):
        errands.take(None, frozenset({0, 1}))


def test_a_death_is_told_once_to_those_it_concerns() -> None:
    it = fleet()
    errands, lost = Errands(it), []
    for index in (0, 1):
        errand = errands.take(None, frozenset({1 - index}))
        errand.on_lost = lambda index=index: lost.append(index)
    it.apply(0, Event.PROBE_FAILED, "gone")
    it.apply(1, Event.CALL_FAILED, "hm")
    assert lost == [0]
