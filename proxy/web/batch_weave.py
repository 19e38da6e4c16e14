"""One stream to the client out of the streams of a batch's parts: who writes, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.web.asgi import Message, Send
from proxy.web.batch_stream import Common


class Weave:
    """What the parts have to say to the client, and the one who says it: the request's own task, in `run`.

    A part hands over some events and goes on when the client's socket has taken them; nothing else is held. Nothing is
    written before every part has been accepted by a replica, or has failed there once: a server refuses a batch before
    it answers any of it. (Failed ones are not waited for: they may wait themselves, for the end of a pause say.)
    `start` makes the head; it is called when the first event is there.
    """

    def __init__(self, send: Send, parts: int, start: Callable[[], Message]) -> None:
        self._send = send
        self._start = start
        self._awaited = set(range(parts))
        self._running = parts
        self._failure: Exception | None = None
        self._accepted = asyncio.Event()
        self._news = asyncio.Event()
        self._offered: list[tuple[bytes, asyncio.Future[None]]] = []
        self.common = Common()
        self.began = False
        self.sent = 0

    # -- the parts' side -----------------------------------------------------------------------------------------------

    def settled(self, part: int) -> None:
        """It was accepted, or is not to be waited for."""
        self._awaited.discard(part)
        if not self._awaited:
            self._accepted.set()

    async def opened(self) -> None:
        """Return when events may be written."""
        await self._accepted.wait()

    async def write(self, data: bytes) -> None:
        """Returns when the client has room for more."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._offered.append((data, taken))
        self._news.set()
        await taken

    def ended(self, failure: Exception | None) -> None:
        """A part is over."""
        self._running -= 1
        self._failure = self._failure or failure
        self._news.set()

    # -- the request's side --------------------------------------------------------------------------------------------

    async def run(self) -> Exception | None:
        """Write what comes until all parts are over; or until the first failure, which is returned."""
        try:
            while self._failure is None and (self._running or self._offered):
                if self._offered:
                    await self._pass_on()
                else:
                    self._news.clear()
                    await self._news.wait()
        finally:
            self._start = _no_head  # it is the request's own method, and the request has parts that know this
        return self._failure

    async def _pass_on(self) -> None:
        offered, self._offered = self._offered, []
        data = b"".join([data for data, _ in offered])
        if not self.began:
            self.began = True
            await self._send(self._start())
        self.sent += len(data)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        for _, taken in offered:
            if not taken.done():
                taken.set_result(None)


def _no_head() -> Message:
    raise RuntimeError("the stream is over")
