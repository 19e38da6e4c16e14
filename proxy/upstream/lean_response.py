"""A response of the lean transport; before its head has arrived, the exchange that waits for it.

It owns its connection from `send` until the body's last byte, an error or an abort. At that moment the two let go of
each other, so that a late `abort()` cannot hit the next exchange on the same connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from proxy.errors import Phase, UpstreamError, UpstreamTimeout

JOINED = 1 << 16
"""Bytes that came while nobody read are given out as one chunk; more are not worth the copy."""


class Carrier(Protocol):
    """What a response needs of the connection under it."""

    def abort(self) -> None: ...

    def resume(self) -> None: ...


class LeanResponse:
    """An `UpstreamResponse`; see there. One task reads it. `carrier`, `parts` and the rest below the second line are
    the connection's to write.
    """

    __slots__ = (
        "_deadline",
        "_error",
        "_loop",
        "_waiter",
        "carrier",
        "content_length",
        "greedy",
        "headers",
        "method",
        "parts",
        "paused",
        "stale",
        "status",
        "waiting",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, method: str, deadline: float | None) -> None:
        self._loop = loop
        self._deadline = deadline
        self._waiter: asyncio.Future[None] | None = None
        self._error: UpstreamError | None = None

        self.method = method
        self.status = 0  # until the head has arrived
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length: int | None = None
        self.carrier: Carrier | None = None  # until the exchange is over
        self.parts: list[bytes] = []  # of the body, not yet taken
        self.waiting = 0  # bytes in them, roughly
        self.greedy = False  # read() wants everything and is not woken for less
        self.paused = False  # the socket is left unread
        self.stale = False  # the connection was used before and closed without a byte: repeat on a fresh one

    # -- the request's side -------------------------------------------------------------------------------------------

    async def head(self) -> bool:
        """Wait for the head. False: nothing came since the connection was `stale`."""
        if self._deadline is None:
            await self._wait()
        else:
            timer = self._loop.call_at(self._deadline, self._expire)
            try:
                await self._wait()
            finally:
                timer.cancel()
        if self.status:
            return True
        if self.stale:
            return False
        assert self._error is not None
        raise self._error

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        except BaseException:
            self.abort()
            raise

    # -- the reader's side --------------------------------------------------------------------------------------------

    def whole(self) -> bytes | None:
        if self.carrier is not None or self._error is not None:
            return None
        return self._take()

    def chunks(self) -> LeanResponse:
        return self

    def __aiter__(self) -> LeanResponse:
        return self

    async def __anext__(self) -> bytes:
        while not self.parts:
            if self.carrier is None:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._wait()
        if self.paused:
            self._resume()
        return self._take() if self.waiting <= JOINED else self._take_one()

    async def read(self) -> bytes:
        self.greedy = True
        timer = None if self._deadline is None else self._loop.call_at(self._deadline, self._expire)
        try:
            if self.paused:
                self._resume()
            while self.carrier is not None:
                await self._wait()
        finally:
            if timer is not None:
                timer.cancel()
        if self._error is not None:
            raise self._error
        return self._take()

    def _take(self) -> bytes:
        parts = self.parts
        self.parts = []
        self.waiting = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take_one(self) -> bytes:
        part = self.parts.pop(0)
        self.waiting = self.waiting - len(part) if self.parts else 0
        return part

    def _resume(self) -> None:
        self.paused = False
        if self.carrier is not None:
            self.carrier.resume()

    def abort(self) -> None:
        self._break("aborted", UpstreamError)

    def _expire(self) -> None:
        self._break("no answer in time", UpstreamTimeout)

    def _break(self, message: str, kind: type[UpstreamError]) -> None:
        carrier = self.carrier
        if carrier is not None:
            self.fail(message, kind)
            carrier.abort()

    # -- the connection's side ----------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Tell the task that waits, if one does, that there is something new."""
        waiter = self._waiter
        if waiter is not None and (self.carrier is None or not self.greedy):
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def finish(self) -> None:
        """The body is complete."""
        self.carrier = None
        self.wake()

    def fail(self, message: str, kind: type[UpstreamError] = UpstreamError) -> None:
        """There will be nothing more. Parts that came before are still given out."""
        self._error = kind(message, Phase.MID_STREAM if self.status else Phase.MAYBE_SENT)
        self.carrier = None
        self.wake()
