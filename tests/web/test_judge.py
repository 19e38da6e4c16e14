from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from proxy.control.desired import Adapter
from proxy.errors import Phase, UpstreamError
from proxy.fleet import Fleet
from proxy.lease import Served
from proxy.replica_state import Event, State
from proxy.routing.router import Router
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint, Headers
from proxy.web.forward import Forwarder
from proxy.web.judge import SMALL_ERROR, Again, broken, declared_dead, judge
from proxy.web.passthrough import Errand
from tests.web.front import FACTS

V1 = Adapter("v1", "/a", None, "v1@aaaa")
SERVED = Served("v1", "v1@aaaa", None, adapter=True)
BASE = Served("base", "base", None, adapter=False)
MISSING = b'{"error":{"message":"The model `v1@aaaa` does not exist."}}'


class Response:
    def __init__(self, status: int, body: bytes = b"", media: bytes = b"application/json", sized: bool = True) -> None:
        self.status = status
        self.headers: Headers = [(b"content-type", media)]
        self.content_length = len(body) if sized else None
        self.body = body

    def whole(self) -> bytes | None:
        return None

    def chunks(self) -> AsyncIterator[bytes]:
        raise NotImplementedError

    async def read(self) -> bytes:
        return self.body

    def abort(self) -> None:
        pass


class World:
    def __init__(self, count: int = 2) -> None:
        self.fleet = Fleet([Endpoint(f"http://r{index}") for index in range(count)], Router())
        for replica in self.fleet.replicas:
            self.fleet.learn(replica.index, FACTS)
            self.fleet.held(replica.index, V1.upstream, V1.path)
        self.fleet.commit(self.fleet.desired.bind(V1))
        for replica in self.fleet.replicas:
            self.fleet.apply(replica.index, Event.CAUGHT_UP)
        self.forwarder = Forwarder(self.fleet, LeanTransport())

    async def judge(self, response: Response, served: Served | None = SERVED, repeated: bool = False) -> bytes | None:
        held = Errand(self.forwarder.errands, self.fleet.replicas[0], served)
        return await judge(self.forwarder, response, held, repeated=repeated, tried=frozenset())

    @property
    def state(self) -> State:
        return self.fleet.replicas[0].state


async def test_a_replica_that_lost_a_committed_adapter() -> None:
    world = World()
    with pytest.raises(Again) as again:
        await world.judge(Response(404, MISSING))
    assert (again.value.repeat, again.value.skip, again.value.error.status) == (False, False, 503)
    assert "aaaa" not in again.value.error.message
    assert world.state is State.JOINING
    assert V1.upstream not in world.fleet.replicas[0].holds


@pytest.mark.parametrize(
    ("response", "served", "read"),
    [
        (Response(404, b"no such response"), SERVED, True),  # about something else
        (Response(404, MISSING), BASE, False),
        (Response(404, MISSING), None, False),
        (Response(404, MISSING, sized=False), SERVED, False),
        (Response(404, MISSING + b" " * SMALL_ERROR), SERVED, False),
        (Response(404, MISSING), Served("v1", "v1@old", None, adapter=True), True),  # bound again meanwhile
        (Response(400, MISSING), SERVED, False),
        (Response(503, MISSING), SERVED, False),
        (Response(500, b"", b"text/html"), SERVED, False),
    ],
)
async def test_the_clients_own_errors(response: Response, served: Served | None, read: bool) -> None:
    world = World()
    assert await world.judge(response, served) == (response.body if read else None)
    assert world.state is State.READY


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_gateway_speaks_for_a_dying_replica(status: int) -> None:
    world = World()
    with pytest.raises(Again) as again:
        await world.judge(Response(status, b"<html>", b"text/html"))
    assert (again.value.repeat, again.value.skip, world.state) == (True, True, State.SUSPECT)


async def test_a_gateway_is_heard_when_nobody_else_is_left_or_it_was_asked_twice() -> None:
    assert await World(count=1).judge(Response(502, b"", b"text/html")) is None
    assert await World().judge(Response(502, b"", b"text/html"), repeated=True) is None


def test_what_may_be_repeated() -> None:
    assert not broken(UpstreamError("refused", Phase.NOT_SENT)).repeat
    assert broken(UpstreamError("reset", Phase.MAYBE_SENT)).repeat
    assert broken(UpstreamError("reset", Phase.MID_STREAM)).repeat
    assert declared_dead().repeat
