"""The life of a request, moment by moment: a transport that does what the test says, and no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from proxy.control.desired import Pause
from proxy.errors import BadRequest, Phase, UpstreamError
from proxy.fleet import Fleet
from proxy.replica_state import Event, State
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint
from proxy.web.asgi import Message
from proxy.web.forward import Forwarder, ForwardSettings
from tests.web.front import FACTS, Notes, commit, until

BODY = b'{"model":"base","prompt":[1,2,3]}'


class Response:
    status = 200
    content_length: int | None = None

    def __init__(self, *parts: bytes | Awaitable[Any]) -> None:
        self.headers = [(b"content-type", b"text/event-stream")]
        self.parts = parts
        self.aborted = 0

    def whole(self) -> bytes | None:
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            yield part if isinstance(part, bytes) else await part

    async def read(self) -> bytes:
        return b"".join([part async for part in self.chunks()])

    def abort(self) -> None:
        self.aborted += 1


class Transport:
    """`script(replica, attempt)` returns or awaits a response, or raises."""

    def __init__(self, script: Callable[[int, int], Any]) -> None:
        self.script = script
        self.asked: list[int] = []

    async def request(self, endpoint: Endpoint, method: str, target: str, **more: Any) -> Response:
        replica = int(endpoint.base[-1])
        self.asked.append(replica)
        result = self.script(replica, len(self.asked))
        return await result if asyncio.isfuture(result) or asyncio.iscoroutine(result) else result

    async def close(self) -> None:
        pass


class World:
    """One request in a fleet of `count` ready replicas."""

    def __init__(self, script: Callable[[int, int], Any], count: int = 1, **settings: Any) -> None:
        self.fleet = Fleet([Endpoint(f"http://r{index}") for index in range(count)], Router("round_robin"))
        for index in range(count):
            self.fleet.learn(index, FACTS)
            self.fleet.apply(index, Event.CAUGHT_UP)
        self.transport = Transport(script)
        self.notes = Notes()
        self.forwarder = Forwarder(self.fleet, self.transport, ForwardSettings(**settings), self.notes)  # type: ignore[arg-type]
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.room_for = 1000
        self._read = False
        self.task: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": BODY, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        while len(self.sent) >= self.room_for:
            await asyncio.sleep(0.001)
        self.sent.append(message)

    def start(self) -> asyncio.Task[None]:
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        run = self.forwarder.completion({**scope, "headers": []}, self.receive, self.send)
        self.task = asyncio.create_task(run)
        return self.task

    async def run(self) -> None:
        async with asyncio.timeout(20):
            await self.start()
        self.rest()

    def rest(self) -> None:
        assert all(replica.in_flight == 0 for replica in self.fleet.replicas)
        assert self.fleet.router.counters()["in_flight"] == 0
        assert len(self.forwarder.gate) == 0
        assert len(self.notes.outcomes) == 1

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def ended(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)


def fails(phase: Phase) -> UpstreamError:
    return UpstreamError("broken", phase)


def raising(error: BaseException) -> Any:
    raise error


def never() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def test_a_good_answer() -> None:
    response = Response(b"a", b"b")
    world = World(lambda replica, attempt: response)
    await world.run()
    assert (world.status, world.ended, response.aborted) == (200, True, 0)


async def test_not_sent_is_tried_on_every_replica_and_on_none_twice() -> None:
    world = World(lambda replica, attempt: raising(fails(Phase.NOT_SENT)) if attempt < 5 else Response(b"a"), count=5)
    await world.run()
    assert world.status == 200
    assert sorted(world.transport.asked) == [0, 1, 2, 3, 4]


async def test_maybe_sent_is_repeated_once() -> None:
    world = World(lambda replica, attempt: raising(fails(Phase.MAYBE_SENT)), count=5)
    await world.run()
    assert world.status == 502
    assert len(set(world.transport.asked)) == len(world.transport.asked) == 2
    assert msgspec.json.decode(world.sent[1]["body"])["error"]["message"] == "broken"


async def test_alone_it_is_repeated_on_the_same_replica() -> None:
    world = World(lambda replica, attempt: raising(fails(Phase.MAYBE_SENT)) if attempt == 1 else Response(b"a"))
    await world.run()
    assert (world.status, world.transport.asked) == (200, [0, 0])


async def test_a_head_that_is_refused_is_the_clients_fault() -> None:
    world = World(lambda replica, attempt: raising(BadRequest("a header value has a line break in it")))
    await world.run()
    assert (world.status, world.fleet.replicas[0].failures) == (400, 0)


@pytest.mark.parametrize("also", ["left", "lost", "cancelled", "nothing"])
async def test_two_things_at_once_before_the_head(also: str) -> None:
    """The replica dies, and in the same turn of the loop something else happens."""
    answer = never()
    world = World(lambda replica, attempt: answer if attempt == 1 else Response(b"a"), count=2)
    task = world.start()
    await until(lambda: world.transport.asked)
    first = world.transport.asked[0]
    if also == "left":
        world.left.set()
        await asyncio.sleep(0)
    elif also == "lost":
        world.fleet.apply(first, Event.PROBE_FAILED, "gone")
    elif also == "cancelled":
        task.cancel()
    if not answer.done():
        answer.set_exception(fails(Phase.MAYBE_SENT))
    async with asyncio.timeout(20):
        await task
    world.rest()
    assert world.status == {"left": None, "lost": 200, "cancelled": 503, "nothing": 200}[also]
    assert len(world.transport.asked) == (2 if also in ("lost", "nothing") else 1)
    assert world.fleet.replicas[first].failures == (1 if also == "nothing" else 0)


async def test_death_and_departure_in_one_turn() -> None:
    world = World(lambda replica, attempt: never(), count=2)
    task = world.start()
    await until(lambda: world.transport.asked)
    world.fleet.apply(world.transport.asked[0], Event.PROBE_FAILED, "gone")
    world.left.set()
    async with asyncio.timeout(20):
        await task
    world.rest()
    assert world.sent == []
    assert world.notes.outcomes[0].left


async def test_a_shutdown_in_the_middle_of_an_answer() -> None:
    response = Response(b"a", never())
    world = World(lambda replica, attempt: response)
    task = world.start()
    await until(lambda: len(world.sent) == 2)
    task.cancel()
    async with asyncio.timeout(20):
        await task  # no exception: the server would print it
    world.rest()
    assert (world.status, world.ended, world.notes.outcomes[0].cut) == (200, False, True)
    assert response.aborted


async def test_death_while_the_clients_socket_is_full() -> None:
    response = Response(b"a", never())
    world = World(lambda replica, attempt: response)
    world.room_for = 1
    task = world.start()
    await until(lambda: world.sent)
    world.fleet.apply(0, Event.PROBE_FAILED, "gone")
    async with asyncio.timeout(20):
        await task
    world.rest()
    assert not world.ended
    assert response.aborted


async def test_death_after_the_last_byte_does_no_harm() -> None:
    response = Response(b"a")
    world = World(lambda replica, attempt: response)
    world.room_for = 2
    task = world.start()
    await until(lambda: len(world.sent) == 2)
    world.fleet.apply(0, Event.PROBE_FAILED, "gone")
    await asyncio.sleep(0.01)
    world.room_for = 3
    async with asyncio.timeout(20):
        await task
    world.rest()
    assert world.ended
    assert not world.notes.outcomes[0].cut


async def test_a_pause_does_not_use_up_patience() -> None:
    world = World(lambda replica, attempt: Response(b"a"), wait_ready_secs=0.01)
    for replica in world.fleet.replicas:
        world.fleet.set_paused(replica.index, True)
    commit(world.fleet, world.fleet.desired.with_pause(Pause("mode=keep", 0.0)))
    task = world.start()
    await until(lambda: world.notes.now_waiting)
    await asyncio.sleep(0.03)
    for replica in world.fleet.replicas:
        world.fleet.set_paused(replica.index, False)
    commit(world.fleet, world.fleet.desired.with_pause(None))
    async with asyncio.timeout(20):
        await task
    assert world.status == 200
    assert world.notes.outcomes[0].waited_secs >= 0.03


async def test_patience_ends_with_what_the_replica_said() -> None:
    world = World(lambda replica, attempt: raising(fails(Phase.NOT_SENT)), wait_ready_secs=0.25)
    await world.run()
    assert world.status == 502
    assert 2 <= len(world.transport.asked) <= 4  # after 0.1 s, 0.2 s more, ...
    assert world.fleet.replicas[0].state is State.READY


async def test_a_restless_fleet_does_not_keep_the_only_replica_from_being_asked_again() -> None:
    world = World(lambda replica, attempt: raising(fails(Phase.NOT_SENT)) if attempt == 1 else Response(b"a"))
    task = world.start()
    async with asyncio.timeout(20):
        while not task.done():
            world.fleet.commit(world.fleet.desired)  # wakes whoever waits
            await asyncio.sleep(0.001)
    assert world.status == 200
