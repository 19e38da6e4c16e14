from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest

from proxy.errors import NotFound, Unavailable
from proxy.web.asgi import CLOSE, Departure, Message, send_error


async def _sent(*args: Any, **more: Any) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    await send_error(send, *args, **more)
    return messages


async def test_an_error_is_answered_in_the_shape_that_clients_parse() -> None:
    start, body = await _sent(NotFound("no such model", param="model"), [CLOSE])
    assert start["status"] == 404
    assert dict(start["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": b"%d" % len(body["body"]),
        b"connection": b"close",
    }
    error = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
    assert msgspec.json.decode(body["body"]) == {"error": error}
    assert not body["more_body"]


async def test_who_may_come_back_is_told_when() -> None:
    start, _ = await _sent(Unavailable("later", retry_after_secs=7))
    assert dict(start["headers"])[b"retry-after"] == b"7"


async def test_an_answer_can_be_left_open() -> None:
    _, body = await _sent(NotFound("x"), end=False)
    assert body["more_body"]


class Server:
    """A `receive` that gives `messages`, each when it was let through."""

    def __init__(self, *messages: Message | BaseException) -> None:
        self.messages = list(messages)
        self.gate = asyncio.Event()
        self.closed = 0

    async def receive(self) -> Message:
        try:
            await self.gate.wait()
            self.gate.clear()
        except GeneratorExit:
            self.closed += 1
            raise
        message = self.messages.pop(0)
        if isinstance(message, BaseException):
            raise message
        return message


GONE = {"type": "http.disconnect"}
MORE = {"type": "http.request", "body": b"x", "more_body": False}


async def _turns() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_departure_is_told_once() -> None:
    server, calls = Server(MORE, GONE), []
    Departure(server.receive, lambda: calls.append(1))
    await _turns()
    server.gate.set()  # bytes that nobody wants
    await _turns()
    assert calls == []
    server.gate.set()
    await _turns()
    assert calls == [1]


async def test_a_departure_that_had_happened_already() -> None:
    async def receive() -> Message:
        return GONE

    calls: list[int] = []
    Departure(receive, lambda: calls.append(1))
    assert calls == [1]


async def test_after_a_stop_nothing_is_told_and_the_server_is_let_go() -> None:
    server, calls = Server(GONE), []
    departure = Departure(server.receive, lambda: calls.append(1))
    departure.stop()
    departure.stop()
    server.gate.set()
    await _turns()
    assert (calls, server.closed) == ([], 1)


async def test_a_stop_after_the_server_woke_but_before_it_was_heard() -> None:
    server, calls = Server(GONE), []
    departure = Departure(server.receive, lambda: calls.append(1))
    server.gate.set()
    departure.stop()
    await _turns()
    assert calls == []


async def test_a_server_that_breaks_has_no_client_any_more() -> None:
    server, calls = Server(RuntimeError("broken")), []
    Departure(server.receive, lambda: calls.append(1))
    server.gate.set()
    await _turns()
    assert calls == [1]


@pytest.mark.parametrize("kind", ["sleep", "task", "queue"])
async def test_whatever_the_server_awaits(kind: str) -> None:
    queue: asyncio.Queue[Message] = asyncio.Queue()

    async def slow() -> Message:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        return GONE

    def receive() -> Awaitable[Message]:
        if kind == "task":
            return _await(asyncio.ensure_future(slow()))
        return queue.get() if kind == "queue" else slow()

    left = asyncio.Event()
    Departure(receive, left.set)
    queue.put_nowait(GONE)
    async with asyncio.timeout(20):
        await left.wait()


async def _await(future: Awaitable[Message]) -> Message:
    return await future
