"""A small ASGI server for one event loop and many ports, that can also misbehave on purpose.

uvicorn cannot refuse connections while its loop goes on, nor cut a response with a TCP reset; a stand-in for a failing
replica must. Otherwise it behaves as uvicorn under vLLM does: HTTP/1.1, keep-alive with an idle limit, chunked streams,
``http.disconnect`` when the client leaves. The app is called when the whole body is there.
"""

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import httptools

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

CONNECTION = "simulator.connection"
"""Key in ``scope["extensions"]`` of the Connection, for apps that want to misbehave."""

_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after the other."""

    def __init__(self, server: "HttpServer") -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[tuple[Scope, bytes, bool]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._gone: asyncio.Future[None] = server.loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self._idle: asyncio.TimerHandle | None = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    def reset(self) -> None:
        """Cut with a TCP RST: the peer sees ECONNRESET, whatever was still to be sent is lost."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def close_if_idle(self) -> None:
        if self._task is None and self._transport is not None:
            self._transport.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._transport = None
        self._queue.clear()
        self._writable.set()
        self._rest()
        if not self._gone.done():
            self._gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._rest()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._bad_request()
        except httptools.HttpParserError:
            self._bad_request()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # httptools

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue" and self._transport is not None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        path, _, query = self._url.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": self._parser.get_http_version(),
            "method": self._parser.get_method().decode("ascii"),
            "path": unquote_to_bytes(path).decode("utf-8", "replace"),
            "raw_path": path,
            "query_string": query,
            "headers": self._headers,
            "scheme": "http",
            "root_path": "",
            "extensions": {CONNECTION: self},
        }
        keep = self._parser.should_keep_alive()
        self._queue.append((scope, b"".join(self._body), keep))
        self._url, self._headers, self._body = b"", [], []
        if self._task is None:
            self._next()

    # One exchange after the other

    def _next(self) -> None:
        if not self._queue:
            self._task = None
            if self._transport is not None:
                self._idle = self._server.loop.call_later(self._server.keep_alive_secs, self.close_if_idle)
            return
        scope, body, keep = self._queue.popleft()
        self._task = self._server.loop.create_task(self._exchange(scope, body, keep))
        self._server.tasks.add(self._task)
        self._task.add_done_callback(self._server.tasks.discard)

    async def _exchange(self, scope: Scope, body: bytes, keep: bool) -> None:
        exchange = _Exchange(self, body, keep, head=scope["method"] == "HEAD")
        try:
            await self._server.app(scope, exchange.receive, exchange.send)
        except Exception as error:
            self._server.failures.append(error)
            self.reset()
        if not exchange.complete:
            self.reset()
        elif not keep and self._transport is not None:
            self._transport.close()
        self._next()

    async def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
            if not self._writable.is_set():
                await self._writable.wait()

    async def wait_gone(self) -> None:
        await asyncio.shield(self._gone)

    def _rest(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _bad_request(self) -> None:
        if self._transport is not None:
            text = b"Invalid HTTP request received."
            head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self._transport.write(_STATUS[400] + head % len(text) + text)
            self._transport.close()


class _Exchange:
    """ASGI's receive and send for one request."""

    def __init__(self, connection: Connection, body: bytes, keep: bool, head: bool) -> None:
        self._connection = connection
        self._body: bytes | None = body
        self._keep = keep
        self._bodyless = head
        self._start: Message | None = None
        self._chunked = False
        self.complete = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._connection.wait_gone()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        out = b""
        if self._start is not None:
            out = self._head(self._start, len(body), more)
            self._start = None
        if not self._bodyless:
            if self._chunked:
                out += b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                out += b"" if more else b"0\r\n\r\n"
            else:
                out += body
        self.complete = not more
        await self._connection.write(out)

    def _head(self, start: Message, size: int, more: bool) -> bytes:
        headers = [(b"date", _date()), (b"server", b"uvicorn"), *start.get("headers", ())]
        named = {name for name, _ in headers}
        if b"content-length" not in named:
            if more:
                self._chunked = True
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                headers.append((b"content-length", b"%d" % size))
        if not self._keep:
            headers.append((b"connection", b"close"))
        status = start["status"]
        line = _STATUS.get(status) or f"HTTP/1.1 {status} \r\n".encode()
        return line + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"


_date_cache = (0, b"")


def _date() -> bytes:
    global _date_cache
    second = int(time.time())
    if _date_cache[0] != second:
        _date_cache = (second, formatdate(second, usegmt=True).encode())
    return _date_cache[1]


class HttpServer:
    """A listening port. While it does not listen the port stays bound, so that connections are refused and nobody else
    gets the number."""

    def __init__(self, app: App, host: str = "127.0.0.1", port: int = 0, keep_alive_secs: float = 5.0) -> None:
        self.app = app
        self.host = host
        self.keep_alive_secs = keep_alive_secs
        self.loop = asyncio.get_running_loop()
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        """Requests being answered, also those whose client has left."""
        self.failures: list[Exception] = []
        """What the app raised; those connections were cut."""
        self._placeholder: socket.socket | None = self._bound(port)
        self.port: int = self._placeholder.getsockname()[1]
        self._server: asyncio.Server | None = None

    @property
    def listening(self) -> bool:
        return self._server is not None

    async def listen(self) -> None:
        """Accept connections (again)."""
        if self._server is None:
            self._server = await self.loop.create_server(
                lambda: Connection(self), sock=self._bound(self.port), backlog=2048
            )
            self._drop_placeholder()

    def refuse(self) -> None:
        """Stop accepting: from now on connections are refused. Those that are open stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._placeholder = self._bound(self.port)

    def reset_connections(self) -> None:
        """Cut every open connection."""
        for connection in list(self.connections):
            connection.reset()

    def kill(self) -> None:
        """Cut every connection and stop whatever was being done for it, as the end of a process does."""
        current = asyncio.current_task()
        for connection in list(self.connections):
            connection.reset()
        for task in list(self.tasks):
            if task is not current:
                task.cancel()

    def close_idle(self) -> None:
        """Close the connections that have no request on them."""
        for connection in list(self.connections):
            connection.close_if_idle()

    def close(self) -> None:
        """Give up the port and cut what is open."""
        self.refuse()
        self._drop_placeholder()
        self.kill()

    def _bound(self, port: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        try:
            sock.bind((self.host, port))
        except OSError:
            sock.close()
            raise
        return sock

    def _drop_placeholder(self) -> None:
        if self._placeholder is not None:
            self._placeholder.close()
            self._placeholder = None
