"""The exchange by itself: what each order of events leads to."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Phase, UpstreamError, UpstreamTimeout
from proxy.upstream.lean_response import LeanResponse


class Carrier:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def resume(self) -> None:
        self.calls.append("resume")


def exchange(deadline: float | None = None, *, status: int = 0, parts: tuple[bytes, ...] = ()) -> LeanResponse:
    response = LeanResponse(asyncio.get_running_loop(), "GET", deadline)
    response.carrier = Carrier()
    response.status = status
    response.parts.extend(parts)
    return response


def calls(carrier: object) -> list[str]:
    assert isinstance(carrier, Carrier)
    return carrier.calls


async def started(coroutine: object) -> asyncio.Task[object]:
    task = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
    await asyncio.sleep(0)
    return task


async def test_head_then_body() -> None:
    response = exchange()
    task = await started(response.head())
    response.status = 200
    response.wake()
    assert await task is True
    reading = await started(response.read())
    response.parts.append(b"a")
    response.wake()
    await asyncio.sleep(0)
    assert not reading.done()  # read() wants it all
    response.parts.append(b"b")
    response.finish()
    assert await reading == b"ab"


async def test_stale_and_failed_heads() -> None:
    response = exchange()
    task = await started(response.head())
    response.stale = True
    response.fail("connection closed")
    assert await task is False

    response = exchange()
    task = await started(response.head())
    response.fail("connection reset")
    with pytest.raises(UpstreamError) as caught:
        await task
    assert caught.value.phase is Phase.MAYBE_SENT


async def test_head_with_a_failure_right_behind_it() -> None:
    response = exchange()
    task = await started(response.head())
    response.status = 200
    response.parts.append(b"half")
    response.fail("connection reset")
    assert await task is True
    assert response.whole() is None
    assert await response.__anext__() == b"half"
    with pytest.raises(UpstreamError) as caught:
        await response.__anext__()
    assert caught.value.phase is Phase.MID_STREAM


async def test_chunks_that_came_together_go_together_and_the_socket_is_read_again() -> None:
    response = exchange(status=200, parts=(b"a", b"b"))
    carrier = response.carrier
    response.paused = True
    assert await response.__anext__() == b"ab"
    assert calls(carrier) == ["resume"]
    assert not response.paused
    response.finish()
    with pytest.raises(StopAsyncIteration):
        await response.__anext__()


async def test_whole() -> None:
    response = exchange(status=200, parts=(b"a", b"b"))
    assert response.whole() is None
    response.finish()
    assert response.whole() == b"ab"


async def test_read_takes_the_brake_off() -> None:
    response = exchange(status=200, parts=(b"a",))
    carrier = response.carrier
    response.paused = True
    task = await started(response.read())
    assert calls(carrier) == ["resume"]
    response.finish()
    assert await task == b"a"


@pytest.mark.parametrize("status", [0, 200])
async def test_deadline(status: int) -> None:
    response = exchange(asyncio.get_running_loop().time() + 0.01, status=status)
    carrier = response.carrier
    with pytest.raises(UpstreamTimeout) as caught:
        await (response.read() if status else response.head())
    assert caught.value.phase is (Phase.MID_STREAM if status else Phase.MAYBE_SENT)
    assert calls(carrier) == ["abort"]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_cancelled_around_the_end(order: str) -> None:
    """Cancelled before the end: closed. After it, in the same turn: the connection is somebody else's already."""
    response = exchange()
    carrier = response.carrier
    task = await started(response.head())
    if order == "before":
        task.cancel()
    response.status = 200
    response.finish()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls(carrier) == []

    response = exchange()
    carrier = response.carrier
    task = await started(response.head())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls(carrier) == ["abort"]


async def test_abort_is_harmless_before_after_and_twice() -> None:
    response = exchange(status=200)
    carrier = response.carrier
    response.abort()
    response.abort()
    assert calls(carrier) == ["abort"]
    with pytest.raises(UpstreamError):
        await response.read()
    done = exchange(status=200, parts=(b"x",))
    carrier = done.carrier
    done.finish()
    done.abort()
    assert calls(carrier) == []
    assert done.whole() == b"x"
