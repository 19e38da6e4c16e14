"""One connection of the lean transport: writes a request, parses the response, one exchange at a time.

httptools' parser (llhttp in its strict mode) reads heads and chunked bodies. A body with a Content-Length, or one that
the end of the connection ends, needs no parser after the head: its bytes are handed on as they were read.

A connection goes back to its pool only from a clean state: response complete, nothing after it, request written out,
and neither side said `close`. Anything else is closed, at once.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol, cast

import httptools

from proxy.upstream.failures import words
from proxy.upstream.headers import BadFraming, framing
from proxy.upstream.lean_response import LeanResponse

HEAD_LIMIT = 1 << 18  # bytes of all heads of one exchange, interim ones included
BUFFER_LIMIT = 1 << 18  # bytes that may wait for a slow consumer before the socket is left unread
JOIN_LIMIT = 1 << 16  # request bodies up to this many bytes are copied behind their head, into one write

_UNTIL_CLOSE = sys.maxsize // 2  # more than any body


class Home(Protocol):
    """What a connection needs of the pool it belongs to."""

    def free(self, connection: Connection) -> None: ...

    def opened(self, connection: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """Made by a pool, as the protocol of `loop.create_connection`."""

    __slots__ = (
        "_chunked",
        "_complete",
        "_exchange",
        "_head_size",
        "_headers",
        "_home",
        "_keep",
        "_parser",
        "_plain_left",
        "_surplus",
        "_transport",
        "_used",
        "idle_since",
    )

    _transport: asyncio.Transport

    def __init__(self, home: Home) -> None:
        self.idle_since = 0.0
        self._home = home
        self._exchange: LeanResponse | None = None
        self._used = False  # it has carried a whole exchange before
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0  # bytes that came since the request was written, while the head is incomplete
        self._plain_left = 0  # body bytes still to come that need no parser
        self._chunked = False
        self._keep = False  # the head allows another exchange
        self._complete = False  # the parser has seen the end of the response
        self._surplus = False  # ... and something behind it

    # -- the exchange's side ------------------------------------------------------------------------------------------

    def send(self, exchange: LeanResponse, head: bytes, body: bytes) -> None:
        self._exchange = exchange
        exchange.carrier = self
        self._head_size = 0
        if len(body) <= JOIN_LIMIT:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    def abort(self) -> None:
        """Close now, whatever is still to be written or read."""
        self._exchange = None
        self._transport.abort()

    def resume(self) -> None:
        self._transport.resume_reading()

    def shut(self) -> None:
        """Close now, and fail what it carries."""
        if self._exchange is not None:
            self._exchange.fail("transport closed")
        self.abort()

    # -- the event loop's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._home.opened(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self._transport.abort()  # bytes that nobody asked for: what came after them could not be trusted
        elif self._plain_left:
            self._take_plain(exchange, data)
        else:
            self._parse(exchange, data)

    def _take_plain(self, exchange: LeanResponse, data: bytes) -> None:
        left = self._plain_left - len(data)
        exchange.parts.append(data if left >= 0 else data[:left])
        if left > 0:
            self._plain_left = left
            self._deliver(exchange, len(data))
        else:
            self._plain_left = 0
            self._parser = httptools.HttpResponseParser(self)  # the old one still waits for this body
            self._finish(exchange, clean=not left)

    def _parse(self, exchange: LeanResponse, data: bytes) -> None:
        head_is_new = not exchange.status
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self._complete:
                self._refuse(exchange, exc.__context__)
                return
            self._surplus = True
        if self._complete:
            self._finish(exchange, clean=not self._surplus and not _stray_line_break(exchange, data))
        elif exchange.status:
            if head_is_new and not self._chunked:
                length = exchange.content_length
                self._plain_left = _UNTIL_CLOSE if length is None else length - sum(map(len, exchange.parts))
            self._deliver(exchange, len(data))
        else:
            self._head_size += len(data)
            if self._head_size > HEAD_LIMIT:
                self._refuse(exchange, BadFraming("response head too large"))

    def _deliver(self, exchange: LeanResponse, size: int) -> None:
        exchange.waiting += size
        exchange.wake()
        if exchange.waiting > BUFFER_LIMIT and not exchange.paused and not exchange.greedy:
            exchange.paused = True
            self._transport.pause_reading()

    def _finish(self, exchange: LeanResponse, *, clean: bool) -> None:
        reusable = clean and self._keep and not self._transport.get_write_buffer_size()
        self._complete = self._surplus = False
        self._exchange = None
        if exchange.paused:
            self._transport.resume_reading()
        exchange.finish()
        if reusable:
            self._used = True
            self._home.free(self)
        else:
            self._transport.abort()

    def _refuse(self, exchange: LeanResponse, cause: BaseException | None) -> None:
        exchange.fail(str(cause) if isinstance(cause, BadFraming) else "not an HTTP response")
        self.abort()

    def eof_received(self) -> None:
        self._home.lost(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._home.lost(self)
        del self._parser  # it holds this connection's methods: a cycle that only the collector could free
        exchange = self._exchange
        if exchange is None:
            return
        self._exchange = None
        if exc is None and self._plain_left > _UNTIL_CLOSE // 2:
            exchange.finish()
            return
        closed = exc is None or isinstance(exc, ConnectionResetError | BrokenPipeError)
        exchange.stale = closed and self._used and not exchange.status and not self._head_size
        exchange.fail(words(exc))

    # -- the parser's side --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            self._surplus = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value.rstrip()))

    def on_headers_complete(self) -> None:
        headers = self._headers
        self._headers = []
        exchange = self._exchange
        status = self._parser.get_status_code()
        if exchange is None or self._complete or (100 <= status < 200 and status != 101):
            return
        exchange.content_length, self._chunked = framing(status, headers)
        exchange.headers = headers
        exchange.status = status
        self._keep = self._parser.should_keep_alive()
        if exchange.method == "HEAD":  # the parser cannot be told that no body follows: this connection ends here
            self._complete = True
            self._keep = False

    def on_body(self, data: bytes) -> None:
        if self._exchange is not None and not self._complete:
            self._exchange.parts.append(data)

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status:
            self._complete = True
        self._headers = []  # trailers


def _stray_line_break(exchange: LeanResponse, data: bytes) -> bool:
    """Whether line breaks follow the response that `data` ends: the one kind of surplus that the parser skips.

    A last read too short to tell counts as one.
    """
    if exchange.content_length and exchange.parts:
        return not data.endswith(exchange.parts[-1])
    return len(data) < 5 or data.endswith(b"\n\r\n\r\n")
