"""The little of ASGI that the data path uses: types, answers of our own, and a watch for the client's departure."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Protocol, cast

from proxy.errors import LorafleetError, Unavailable
from proxy.upstream.transport import Headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

CLOSE = (b"connection", b"close")
_JSON = (b"content-type", b"application/json")


async def send_error(send: Send, error: LorafleetError, headers: Headers = (), *, end: bool = True) -> None:
    """Answer with an error of our own, in the shape that vLLM and OpenAI clients parse.

    With `end=False` the client has the whole answer, and the server still waits for the last, empty, body message.
    """
    body = error.json()
    lines = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
    if isinstance(error, Unavailable):
        lines.append((b"retry-after", b"%d" % error.retry_after_secs))
    await send({"type": "http.response.start", "status": error.status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": not end})


class Departure:
    """Calls `left` when the client goes away; started once the whole body has been read.

    The server's `receive` is stepped from callbacks of the future that it waits for: a task for it takes about twice
    as long (6 us a request instead of 3). `stop()` ends the watch. Servers also say that a client left when the
    response is complete: by then, stop it or ignore the call.
    """

    __slots__ = ("_left", "_receive", "_waiting")

    def __init__(self, receive: Receive, left: Callable[[], None]) -> None:
        self._receive = receive
        self._left = left
        self._waiting: Coroutine[Any, None, Message] | None = None
        self._step()

    def stop(self) -> None:
        waiting, self._waiting = self._waiting, None
        self._left = _nobody
        if waiting is not None:
            waiting.close()

    def _step(self, _done: object = None) -> None:
        left = self._left
        if left is _nobody:
            return
        while True:
            if self._waiting is None:
                self._waiting = cast("Coroutine[Any, None, Message]", self._receive())
            try:
                future = self._waiting.send(None)
            except StopIteration as stop:
                self._waiting = None
                if stop.value["type"] == "http.disconnect":
                    left()
                    return
                continue  # bytes after the body: nobody wants them
            except BaseException:
                self._waiting = None
                left()
                return
            break
        if future is None:
            asyncio.get_running_loop().call_soon(self._step)
        else:
            future._asyncio_future_blocking = False  # what a task does on taking over a future
            future.add_done_callback(self._step)


REQUEST = "lorafleet.request"
"""Where lorafleet's own server leaves its side of the request in the scope."""


class Watch(Protocol):
    """A watch for the client's departure, until `stop()`."""

    def stop(self) -> None: ...


def watch(scope: Scope, receive: Receive, left: Callable[[], None]) -> Watch:
    """Call `left` when the client goes away; started once the whole body has been read."""
    request = scope.get(REQUEST)
    if request is None:  # another server
        return Departure(receive, left)
    request.watch(left)
    return cast(Watch, request)


def _nobody() -> None:
    pass
