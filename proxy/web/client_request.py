"""One request of a client's connection, as ASGI shows it: `receive`, `send`, and the bytes of the answer.

The head of an answer goes out together with the first bytes of its body: one system call and one packet for most
answers. Whoever wants to know when the client leaves says so with `watch`, which costs no task and no waiting call.
"""

from __future__ import annotations

import asyncio
import http
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.errors import LorafleetError
from proxy.upstream.headers import block
from proxy.web.asgi import REQUEST, ASGIApp, Message, Scope

if TYPE_CHECKING:
    from proxy.web.client_connection import ClientConnection

logger = logging.getLogger("lorafleet.http")

TOGETHER = 64 << 10
"""Bytes of a body from which on it is not copied behind its head: that costs more than a second buffer."""

_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_DISCONNECT: Message = {"type": "http.disconnect"}
_BODILESS = (204, 304)


class ClientRequest:
    """Between a `ClientConnection`, which feeds it, and the application, which gets `receive` and `send`.

    `complete`: the whole answer was handed to the socket. `gone`: the client left before that.
    """

    __slots__ = (
        "_app",
        "_body",
        "_body_size",
        "_chunked",
        "_connection",
        "_expect",
        "_given",
        "_head",
        "_left",
        "_length",
        "_more",
        "_no_body",
        "_started",
        "_waiter",
        "complete",
        "gone",
        "keep_alive",
        "scope",
    )

    def __init__(
        self, connection: ClientConnection, app: ASGIApp, scope: Scope, *, keep_alive: bool, expect: bool
    ) -> None:
        self._connection = connection
        self._app = app
        self.scope = scope
        self.keep_alive = keep_alive
        self.complete = False
        self.gone = False
        self._expect = expect  # the client waits for `100 Continue` before it sends the body
        self._body: list[bytes] = []
        self._body_size = 0
        self._more = True  # the connection still reads the body
        self._given = False  # the application has the last part of it
        self._waiter: asyncio.Future[None] | None = None
        self._left: Callable[[], None] | None = None
        self._started = False
        self._head = b""  # of the answer, until the first part of its body
        self._no_body = False
        self._chunked = False
        self._length: int | None = None  # bytes of the answer's body still to come, None when nobody knows

    # -- the connection's side -----------------------------------------------------------------------------------------

    @property
    def read_ahead(self) -> int:
        """Bytes of the body that the application has not asked for yet."""
        return self._body_size

    @property
    def started(self) -> bool:
        return self._started

    def feed(self, data: bytes) -> None:
        if not self.complete:
            self._body.append(data)
            self._body_size += len(data)
            self._wake()

    def feed_end(self) -> None:
        self._more = False
        self._wake()

    def leave(self) -> None:
        """The client is gone; what is still sent to it goes nowhere."""
        if self.complete or self.gone:
            return
        self.gone = True
        self._wake()
        left, self._left = self._left, None
        if left is not None:
            left()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the application's side ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs the application to its end; an answer that it left unfinished is cut, so that it never looks whole."""
        try:
            await self._app(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("a request broke inside lorafleet")
            await self._give_up()
        except asyncio.CancelledError:
            await self._give_up()
            raise
        else:
            if not self.complete and not self.gone:
                await self._give_up()
        finally:
            self._left = None
            self.scope.pop(REQUEST, None)  # a cycle, of every request, that only the collector could free

    async def _give_up(self) -> None:
        if self.complete or self.gone:
            return
        if self._started:
            self._connection.transport.close()
            return
        text = LorafleetError("lorafleet could not answer this request; its log says why").json()
        lines = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text))]
        await self.send({"type": "http.response.start", "status": 500, "headers": [*lines, (b"connection", b"close")]})
        await self.send({"type": "http.response.body", "body": text})

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` once when the client leaves before the answer is complete; now, when it has left."""
        if self.gone:
            left()
            return
        self._left = left
        self._connection.read_on()

    def stop(self) -> None:
        """End the watch."""
        self._left = None

    async def receive(self) -> Message:
        """The body in parts, as they came; then `http.disconnect` once the client is gone or has its answer."""
        connection = self._connection
        if self._expect:
            self._expect = False
            if not self._started:
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.gone or self.complete):
            if self._body or not (self._more or self._given):
                parts, self._body, self._body_size = self._body, [], 0
                self._given = not self._more
                body = parts[0] if len(parts) == 1 else b"".join(parts)
                return {"type": "http.request", "body": body, "more_body": self._more}
            connection.read_on()
            if self._waiter is None:
                self._waiter = connection.loop.create_future()
            await self._waiter
        return _DISCONNECT

    async def send(self, message: Message) -> None:
        """Raises RuntimeError for what is not HTTP; waits while the client does not read."""
        connection = self._connection
        if connection.full is not None and not self.gone:
            await connection.room()
        if self.gone:
            return
        if not self._started:
            self._start(message["status"], message["headers"])
            return
        if self.complete:
            raise RuntimeError("sent after the answer was complete")
        body: bytes = message.get("body", b"")
        last = not message.get("more_body", False)
        self._write(body, last=last)
        if last:
            if self._length:
                raise RuntimeError("the answer is shorter than its Content-Length")
            self.complete = True
            self._wake()
            connection.answered(self)

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        lines = []
        for line in headers:
            name = line[0]
            if name == b"content-length":
                self._length = int(line[1])
            elif name == b"connection":
                self.keep_alive = self.keep_alive and b"close" not in line[1].lower()
                continue
            elif name == b"transfer-encoding":
                continue
            lines.append(line)
        self._no_body = self.scope["method"] == "HEAD" or status in _BODILESS
        if self._no_body:
            self._length = None
        elif self._length is None:
            self._chunked = self.scope["http_version"] == "1.1"
            if self._chunked:
                lines.append((b"transfer-encoding", b"chunked"))
            else:
                self.keep_alive = False  # the end of the connection is the end of the body
        if not self.keep_alive:
            lines.append((b"connection", b"close"))
        first = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
        self._head = b"%b%b%b\r\n" % (first, self._connection.date_line(), block(lines))
        self._started = True

    def _write(self, body: bytes, *, last: bool) -> None:
        head, self._head = self._head, b""
        size = len(body)
        tail = b""
        if self._no_body:
            body, size = b"", 0
        elif self._chunked:
            if size:
                head += b"%x\r\n" % size
                tail = b"\r\n"
            if last:
                tail += b"0\r\n\r\n"
        elif self._length is not None:
            if size > self._length:
                raise RuntimeError("the answer is longer than its Content-Length")
            self._length -= size
        if size > TOGETHER:
            self._connection.transport.writelines([part for part in (head, body, tail) if part])
        elif head or size or tail:
            self._connection.transport.write(b"%b%b%b" % (head, body, tail) if head or tail else body)
