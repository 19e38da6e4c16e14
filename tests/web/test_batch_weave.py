from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from proxy.errors import Unavailable
from proxy.web.asgi import Message
from proxy.web.batch_weave import Weave


async def steps(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_nothing_is_written_before_all_are_settled() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    weave = Weave(send, 2, lambda: {"type": "http.response.start"})

    async def part(number: int) -> None:
        weave.settled(number)
        await weave.opened()
        await weave.write(b"%d" % number)

    running = asyncio.create_task(weave.run())
    parts = [started(weave, part(0))]
    await steps(9)
    assert not sent
    assert not weave.began
    parts.append(started(weave, part(1)))
    assert await running is None
    assert b"".join(message.get("body", b"") for message in sent) in (b"01", b"10")
    assert (weave.began, weave.sent, "body" in sent[0]) == (True, 2, False)


def started(weave: Weave, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    async def run() -> None:
        try:
            await part
        except asyncio.CancelledError:
            weave.ended(Unavailable("cancelled"))
        else:
            weave.ended(None)

    return asyncio.create_task(run())


async def test_parts_go_on_when_the_client_has_taken_what_they_said() -> None:
    taken: list[bytes] = []
    room = asyncio.Semaphore(1)

    async def send(message: Message) -> None:
        if "body" in message:
            await room.acquire()
            taken.append(message["body"])

    weave = Weave(send, 3, lambda: {"type": "http.response.start"})
    running = asyncio.create_task(weave.run())
    offers = [0, 0, 0]

    async def part(number: int) -> None:
        while True:
            offers[number] += 1
            await weave.write(b"%d" % number)

    parts = [started(weave, part(number)) for number in range(3)]
    await steps(50)
    assert (b"".join(taken), offers) == (b"012", [2, 2, 2])
    parts[1].cancel()  # while what it offered is being written
    await steps(50)
    assert not running.done()
    room.release()
    failure = await running
    assert isinstance(failure, Unavailable)
    assert taken == [b"012", b"012"]
    for each in parts:
        each.cancel()
    await asyncio.gather(*parts, return_exceptions=True)


async def test_without_a_word_nothing_is_written() -> None:
    async def send(message: Message) -> None:
        raise AssertionError(message)

    weave = Weave(send, 2, lambda: {"type": "http.response.start"})
    running = asyncio.create_task(weave.run())
    await steps(3)
    weave.ended(None)
    await steps(3)
    assert not running.done()
    weave.ended(None)
    assert await running is None
    assert not weave.began


async def test_the_first_failure_ends_it_and_what_was_offered_with_it_is_not_written() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    weave = Weave(send, 3, lambda: {"type": "http.response.start"})
    offering = asyncio.create_task(weave.write(b"x"))
    await steps(1)
    first, second = Unavailable("first"), Unavailable("second")
    weave.ended(first)
    weave.ended(second)
    assert await weave.run() is first
    assert not sent
    offering.cancel()
