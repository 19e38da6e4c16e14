"""HTTP/1.1 for clients: one connection, its parser, and the requests on it, one after the other.

`uvicorn.Config(http=ClientConnection)`: uvicorn keeps the sockets, the signals, the lifespan and the graceful end, and
this takes the place of its protocol class, which took about a tenth of the time of a request (measured with prompts of
600 tokens). httptools (llhttp in its strict mode) parses, as in uvicorn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.server import ServerState

from proxy.web.asgi import REQUEST, ASGIApp, Scope
from proxy.web.client_request import ClientRequest

HEAD_LIMIT = 1 << 18
"""Bytes of a request's line and header block."""

READ_AHEAD = 1 << 18
"""Bytes of a body that may wait for the application before the socket is left unread."""

PIPELINED = 64
"""Requests that may wait behind the one that is being answered. What comes after them is not read: to leave it in the
socket would hide the client's departure from the one that is being answered."""

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_TARGETS = 256
_targets: dict[bytes, tuple[str, bytes, bytes]] = {}


class ClientConnection(asyncio.Protocol):
    """What `uvicorn.Server` makes for each connection."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.loop = _loop or asyncio.get_running_loop()
        self.full: asyncio.Future[None] | None = None  # done when the client reads again
        self._app = cast(ASGIApp, config.loaded_app)
        self._state = server_state
        self._idle_secs = config.timeout_keep_alive
        self._idle_since = self.loop.time()
        self._reaper: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport
        self._client: Any = None
        self._server: Any = None
        self._parser = httptools.HttpRequestParser(self)
        # A request after one that said `close` is an error of the parser's otherwise; here it is not answered.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expect = False
        self._in_head = True
        self._head_size = 0
        self._moved = False  # the parser came to something since the last bytes: a head's end, a body's bytes
        self._idle_bytes = 0  # of the current body that were neither: trailers, extensions of chunks
        self._paused = False
        self._deaf = False  # what still comes is not HTTP/1.1
        self._incoming: ClientRequest | None = None  # the one that is being read
        self._current: ClientRequest | None = None  # the one that is being answered
        self._queue: deque[ClientRequest] = deque()  # pipelined ones behind it

    # -- the event loop's side -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client = _address(transport.get_extra_info("peername"))
        self._server = _address(transport.get_extra_info("sockname"))
        self._state.connections.add(cast(Any, self))
        self._reaper = self.loop.call_later(self._idle_secs, self._reap)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        del self._parser  # it holds this connection's methods: a cycle that only the collector could free
        self._queue.clear()
        current, self._current = self._current, None
        if current is not None:
            current.leave()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._deaf or self.transport.is_closing():
            return
        in_head = self._in_head
        self._moved = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._last_request()  # h2c, websocket: the request is answered as it is, what follows is not HTTP/1.1
        except httptools.HttpParserError:
            self._refuse(b"400 Bad Request", b"Invalid HTTP request received.")
            return
        if self._in_head:
            self._head_size = self._head_size + len(data) if in_head else len(data)
        elif not self._moved:
            self._idle_bytes += len(data)
        if max(self._head_size, self._idle_bytes) > HEAD_LIMIT:
            self._refuse(b"431 Request Header Fields Too Large", b"The header lines of this request are too long.")
        elif self._incoming is not None and self._incoming.read_ahead > READ_AHEAD:
            if self._incoming is self._current:
                self._hold()
            else:
                self._queue.pop()  # never answered: the connection ends with what came before it
                self._last_request()

    def pause_writing(self) -> None:
        if self.full is None:
            self.full = self.loop.create_future()

    def resume_writing(self) -> None:
        full, self.full = self.full, None
        if full is not None and not full.done():
            full.set_result(None)

    def shutdown(self) -> None:
        """uvicorn ends: no further request on this connection."""
        if self._current is None:
            self.transport.close()
        else:
            self._current.keep_alive = False

    def _reap(self) -> None:
        """One timer for the life of the connection: to set one anew for every request costs more than to look."""
        now = self.loop.time()
        due = now + self._idle_secs if self._current is not None else self._idle_since + self._idle_secs
        if due <= now:
            self.transport.close()
            return
        self._reaper = self.loop.call_at(due, self._reap)

    # -- the parser's side ---------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._expect = False
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: too late to mean anything
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expect = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        parser = self._parser
        self._in_head = False
        self._moved = True
        self._idle_bytes = 0
        version = parser.get_http_version()
        path, raw_path, query = _targets.get(self._url) or _target(self._url)
        scope: Scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "scheme": "http",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
        }
        keep_alive = version == "1.1" and parser.should_keep_alive()
        request = ClientRequest(self, self._app, scope, keep_alive=keep_alive, expect=self._expect)
        scope[REQUEST] = request
        self._incoming = request
        if self._current is None:
            self._begin(request)
        else:
            self._queue.append(request)
            if len(self._queue) > PIPELINED:
                self._queue.pop()
                self._incoming = None
                self._last_request()

    def on_body(self, data: bytes) -> None:
        self._moved = True
        if self._incoming is not None:
            self._incoming.feed(data)

    def on_message_complete(self) -> None:
        incoming, self._incoming = self._incoming, None
        self._in_head = True
        self._head_size = self._idle_bytes = 0
        if incoming is not None:
            incoming.feed_end()

    # -- the requests' side --------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until the client reads, or is gone."""
        while self.full is not None:
            await asyncio.shield(self.full)

    def read_on(self) -> None:
        """The application wants more of the body, or to hear when the client leaves."""
        if self._paused:
            self._paused = False
            self.transport.resume_reading()

    def date_line(self) -> bytes:
        """uvicorn keeps the date's line, once a second."""
        return b"".join([b"%b: %b\r\n" % line for line in self._state.default_headers])

    def answered(self, request: ClientRequest) -> None:
        """Its answer is complete: next."""
        self._current = None
        self._idle_since = self.loop.time()
        if not request.keep_alive:
            self._queue.clear()
            self.transport.close()
        elif self._queue:
            self._begin(self._queue.popleft())
        self.read_on()

    def _begin(self, request: ClientRequest) -> None:
        self._current = request
        tasks = self._state.tasks
        task = self.loop.create_task(request.run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _hold(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _last_request(self) -> None:
        """Nothing after the requests that came is read; the connection ends with the last answer."""
        self._deaf = True
        if self._queue:
            self._queue[-1].keep_alive = False
        elif self._current is not None:
            self._current.keep_alive = False

    def _refuse(self, status: bytes, text: bytes) -> None:
        """What came is not HTTP. Answers that are owed for what came before it still go out."""
        current, incoming = self._current, self._incoming
        if current is not None and current is not incoming:
            if incoming is not None:
                self._queue.pop()
            self._last_request()
            return
        if current is None or not current.started:
            lines = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            self.transport.write(b"HTTP/1.1 %b\r\n%bcontent-length: %d\r\n\r\n%b" % (status, lines, len(text), text))
        self.transport.close()
        if current is not None:
            current.leave()


def _address(name: Any) -> tuple[str, int] | None:
    return (str(name[0]), int(name[1])) if isinstance(name, (tuple, list)) and len(name) >= 2 else None


def _target(url: bytes) -> tuple[str, bytes, bytes]:
    """(path, raw path, query). Raises httptools.HttpParserInvalidURLError; the common ones are remembered."""
    parsed = httptools.parse_url(url)
    raw_path = parsed.path or b"/"
    path = raw_path.decode("ascii")
    found = (unquote(path) if "%" in path else path, raw_path, parsed.query or b"")
    if len(_targets) < _TARGETS and len(url) < 256:
        _targets[url] = found
    return found
