"""Batches moment by moment, without sockets: whatever happens at whichever await, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.errors import Phase, UpstreamError
from proxy.fleet import Fleet
from proxy.replica_state import Event, State
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint
from proxy.web.asgi import Message
from proxy.web.batch_merge import PartAnswer
from proxy.web.batch_part import Share
from proxy.web.batch_stream import PartEvents
from proxy.web.batch_weave import Weave
from proxy.web.exchange import Exchange
from proxy.web.forward import Forwarder, ForwardSettings
from proxy.web.relay import Relay
from tests.web.batches import answer
from tests.web.front import FACTS, Notes
from tests.web.test_batch_stream import events, parsed

COUNT = 6


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Replica:
    """Answers prompts that are numbers, with a turn of the loop between any two things that it does."""

    def __init__(self, asked: bytes) -> None:
        body = json.loads(asked)
        prompts = [prompt[0] for prompt in body["prompt"]]
        self.status = 200
        self.content_length = None
        self.stream = body["stream"]
        if self.stream:
            self.parts = events(prompts, 1, "x", f"cmpl-{prompts[0]}", counted=True, seed=prompts[0])
        else:
            whole = answer(prompts, 1, "x")
            self.parts = [whole[:100], whole[100:]]
        media = b"text/event-stream" if self.stream else b"application/json"
        self.headers = [(b"content-type", media)]
        self.aborted = False
        self.ended = False

    def whole(self) -> bytes | None:
        return None

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            await asyncio.sleep(0)
            yield part
        self.ended = True

    async def read(self) -> bytes:
        return b"".join([part async for part in self.chunks()])

    def abort(self) -> None:
        self.aborted = True


class Scene:
    """One batch of `COUNT` prompts over three replicas, each of which has two of them."""

    def __init__(self, *, stream: bool, fail: int | None = None, room: bool = True) -> None:
        """`fail`: the first call to that replica breaks. `room`: the client reads."""
        self.fleet = Fleet([Endpoint(f"http://r{index}") for index in range(3)], Router("round_robin"))
        for index in range(3):
            self.fleet.learn(index, FACTS)
            self.fleet.apply(index, Event.CAUGHT_UP)
        self.notes = Notes()
        self.forwarder = Forwarder(self.fleet, self, ForwardSettings(wait_ready_secs=5), self.notes)  # type: ignore[arg-type]
        self.body = json.dumps(
            {"model": "base", "prompt": [[at] for at in range(COUNT)], "stream": stream, "n": 1}
        ).encode()
        self.fail = fail
        self.calls: list[Replica] = []
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.room = asyncio.Event()
        if room:
            self.room.set()
        self._read = False
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        self.task = asyncio.create_task(self.forwarder.completion({**scope, "headers": []}, self.receive, self.send))

    async def request(self, endpoint: Endpoint, *args: Any, body: bytes, **more: Any) -> Replica:
        await asyncio.sleep(0)
        if self.fail == int(endpoint.base[-1]):
            self.fail = None
            raise UpstreamError("broken", Phase.MAYBE_SENT)
        replica = Replica(body)
        self.calls.append(replica)
        try:
            await steps(2)
        except BaseException:
            replica.aborted = True
            raise
        return replica

    async def close(self) -> None:
        pass

    async def receive(self) -> Message:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        await self.room.wait()
        self.sent.append(message)

    async def end(self) -> None:
        async with asyncio.timeout(20):
            await self.task
        assert all(replica.in_flight == 0 and not replica.running for replica in self.fleet.replicas)
        assert self.fleet.router.counters()["in_flight"] == 0
        assert len(self.forwarder.gate) == 0
        assert len(self.notes.outcomes) == 1
        assert all(call.ended or call.aborted for call in self.calls)
        assert len(asyncio.all_tasks()) == 1  # this test's own

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def ended(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    def check(self) -> str:
        """What the client got is nothing, an error, a cut stream, or right. Says which."""
        if not self.sent:
            return "nothing"
        status = self.sent[0]["status"]
        if status != 200:
            assert json.loads(self.data)["error"]["code"] == status
            return "error"
        if not self.ended:
            return "cut"
        if b"data: " not in self.data:
            assert [choice["index"] for choice in json.loads(self.data)["choices"]] == list(range(COUNT))
            return "answer"
        found = parsed(self.data)
        assert found[-1] == "done"
        if "error" in found[-2]:
            return "error event"
        assert [event["choices"][0]["index"] for event in sorted_events(found[:-2])] == [
            at for at in range(COUNT) for _ in range(3)
        ]
        assert found[-2]["choices"] == []
        assert found[-2]["usage"]["prompt_tokens"] == sum(10 + at for at in range(COUNT))
        return "answer"


def sorted_events(found: list[Any]) -> list[Any]:
    return sorted(found, key=lambda event: (event["choices"][0]["index"], event["choices"][0]["step"]))


STREAMED = pytest.mark.parametrize("stream", [False, True])


@STREAMED
@pytest.mark.parametrize("fail", [None, 1])
async def test_undisturbed(stream: bool, fail: int | None) -> None:
    scene = Scene(stream=stream, fail=fail)
    await scene.end()
    assert scene.check() == "answer"
    assert len(scene.calls) == 3
    assert len(scene.notes.retries) == (fail is not None)


async def at_each_step(event: Any, *, stream: bool, **scene: Any) -> list[str]:
    """What the client got when `event(scene)` happened after 0, 1, 2 ... turns of the loop, until it is over before."""
    seen = []
    for count in range(500):
        it = Scene(stream=stream, **scene)
        await steps(count + 1)  # it has begun
        if it.task.done():
            break
        event(it)
        it.room.set()
        await it.end()
        seen.append(it.check())
    else:
        raise AssertionError("it never ends")
    assert len(seen) > 10
    return seen


@STREAMED
@pytest.mark.parametrize("fail", [None, 1])
@pytest.mark.parametrize("room", [False, True])
async def test_the_client_leaves_at_any_moment(stream: bool, fail: int | None, room: bool) -> None:
    def leave(it: Scene) -> None:
        it.left.set()

    if not room:  # it never ends by itself: as many steps as it takes to be stuck
        for count in range(40):
            it = Scene(stream=stream, fail=fail, room=False)
            await steps(count)
            it.left.set()
            await steps(1)
            await it.end()
        return
    seen = await at_each_step(leave, stream=stream, fail=fail)
    assert set(seen) <= {"nothing", "cut", "answer"}


@STREAMED
@pytest.mark.parametrize("fail", [None, 1])
async def test_the_server_shuts_down_at_any_moment(stream: bool, fail: int | None) -> None:
    def cancel(it: Scene) -> None:
        it.task.cancel()

    seen = await at_each_step(cancel, stream=stream, fail=fail)
    assert set(seen) <= {"nothing", "error", "cut", "answer"}


@STREAMED
@pytest.mark.parametrize("fail", [None, 0, 1])
@pytest.mark.parametrize("dead", [0, 1, 2])
async def test_a_replica_is_declared_dead_at_any_moment(stream: bool, fail: int | None, dead: int) -> None:
    def die(it: Scene) -> None:
        it.fleet.apply(dead, Event.PROBE_FAILED, "gone")
        assert it.fleet.replicas[dead].state is State.DOWN

    seen = await at_each_step(die, stream=stream, fail=fail)
    expected = {"answer", "error"} | ({"cut", "error event"} if stream else set())
    assert set(seen) <= expected
    assert seen[0] == "answer"
    if fail is None and not stream:
        assert set(seen) == {"answer"}


@STREAMED
async def test_all_replicas_but_one_are_declared_dead_at_any_moment(stream: bool) -> None:
    def die(it: Scene) -> None:
        for index in (0, 2):
            it.fleet.apply(index, Event.PROBE_FAILED, "gone")

    seen = await at_each_step(die, stream=stream)
    assert set(seen) <= ({"answer", "cut"} if stream else {"answer"})


@STREAMED
async def test_death_and_departure_at_any_moment(stream: bool) -> None:
    def both(it: Scene) -> None:
        it.fleet.apply(1, Event.PROBE_FAILED, "gone")
        it.left.set()

    seen = await at_each_step(both, stream=stream)
    assert set(seen) <= {"nothing", "cut", "answer"}


@STREAMED
@pytest.mark.parametrize("left", [False, True])
async def test_nothing_is_left_for_the_collector(stream: bool, left: bool) -> None:
    """It runs seldom."""
    kinds = (Exchange, Relay, Weave, PartEvents, PartAnswer, Share, asyncio.Task)
    gc.collect()
    gc.disable()
    earlier = [it for it in gc.get_objects() if isinstance(it, kinds)]  # of other tests
    try:
        for _ in range(3):
            scene = Scene(stream=stream)
            if left:
                await steps(8)
                scene.left.set()
            await scene.end()
            del scene.task  # it holds this scene's own methods
        del scene
        await steps(3)
        known = {id(it) for it in earlier}
        found = [it for it in gc.get_objects() if isinstance(it, kinds) and id(it) not in known]
    finally:
        gc.enable()
    assert found == []


async def test_a_full_gate_refuses_a_part_that_has_to_wait() -> None:
    """The answer to the whole is then that nobody can serve it."""
    scene = Scene(stream=False, fail=1)
    scene.forwarder.gate._limit = 0
    await steps(1)
    for index in range(3):
        scene.fleet.apply(index, Event.DRIFTED, "behind")
    await scene.end()
    assert scene.check() == "error"
    assert "waiting already" in json.loads(scene.data)["error"]["message"]
