"""The safe transport, on aiohttp. The only file that imports it; its exceptions end here."""

from __future__ import annotations

import asyncio
import io
import ssl
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import aiohttp
from yarl import URL

from proxy.errors import BadRequest, Phase, UpstreamError, UpstreamTimeout
from proxy.upstream import headers as rules
from proxy.upstream.failures import words
from proxy.upstream.transport import Endpoint, Headers

_HEAD_LIMIT = 1 << 18  # bytes of a response's status line, and of one header line
_READ_BUFFER = 1 << 18  # bytes that may wait for a slow consumer before the socket is left unread
_PLAIN_BODY_LIMIT = 1 << 20  # aiohttp warns about larger bytes objects and writes file objects piecewise
_AUTO_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


class _Life:
    """What must be known of one connection from one response to the next.

    aiohttp (3.14) does not tell a body's reader when the body cannot be parsed any further: it closes the connection,
    and the reader would wait for ever. So the end of the connection ends the body here. And a reset ends a body without
    length as properly as a close would: `broken` tells them apart.
    """

    __slots__ = ("_content", "_over", "broken")

    def __init__(self) -> None:
        self._content: aiohttp.StreamReader | None = None
        self._over = False
        self.broken = False

    def carry(self, content: aiohttp.StreamReader) -> None:
        self._content = content
        if self._over:
            self._end(content)

    def ended(self, closed: asyncio.Future[None]) -> None:
        self.broken = closed.exception() is not None
        self._over = True
        if self._content is not None:
            self._end(self._content)

    @staticmethod
    def _end(content: aiohttp.StreamReader) -> None:
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError())


class _Attempt:
    """What is known of one try: which connection it got, and whether that had been used before."""

    __slots__ = ("life", "reused", "transport")

    def __init__(self) -> None:
        self.life = _Life()
        self.transport: asyncio.Transport | None = None
        self.reused = False

    @property
    def phase(self) -> Phase:
        return Phase.NOT_SENT if self.transport is None else Phase.MAYBE_SENT

    def abort(self) -> None:
        # aiohttp closes politely, that is after it has written what is still buffered.
        if self.transport is not None:
            self.transport.abort()


_attempt: ContextVar[_Attempt] = ContextVar("attempt")


class _Connector(aiohttp.TCPConnector):
    """Tells the attempt in whose context it runs which connection was handed out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._lives: weakref.WeakKeyDictionary[Any, _Life] = weakref.WeakKeyDictionary()

    async def connect(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        while True:
            connection = await super().connect(req, traces, timeout)
            protocol = connection.protocol
            life = self._lives.get(protocol)
            if life is None or protocol is None or not protocol.should_close:
                break
            connection.close()  # bytes came while it was idle; they would be taken for the next response
        attempt = _attempt.get()
        attempt.reused = life is not None
        attempt.transport = connection.transport
        if life is not None:
            attempt.life = life
        elif protocol is not None:
            self._lives[protocol] = attempt.life
            if (closed := protocol.closed) is not None:
                closed.add_done_callback(attempt.life.ended)
        return connection


class AiohttpResponse:
    """An `UpstreamResponse`; see there."""

    __slots__ = ("_deadline", "_life", "_raw", "_until_close", "content_length", "headers", "status")

    def __init__(self, raw: aiohttp.ClientResponse, life: _Life, deadline: float | None) -> None:
        self._raw = raw
        self._life = life
        self._deadline = deadline
        self.status: int = raw.status
        self.headers: Headers = [(name.lower(), value) for name, value in raw.raw_headers]
        self.content_length, chunked = rules.framing(raw.status, self.headers)
        self._until_close = self.content_length is None and not chunked
        life.carry(raw.content)

    def whole(self) -> bytes | None:
        content = self._raw.content
        if not content.is_eof() or content.exception() is not None or self._cut_short():
            return None
        return content.read_nowait()

    def _cut_short(self) -> bool:
        return self._until_close and self._life.broken

    async def chunks(self) -> AsyncIterator[bytes]:
        failure: UpstreamError | None = None
        ended = False
        try:
            async for chunk in self._raw.content.iter_any():
                yield chunk
            if self._cut_short():
                failure = UpstreamError("connection reset", Phase.MID_STREAM)
            ended = True
        except (aiohttp.ClientError, OSError) as exc:
            failure = UpstreamError(_words(exc), Phase.MID_STREAM)
        finally:
            if not ended:
                self.abort()
        if failure is not None:
            raise failure

    async def read(self) -> bytes:
        try:
            async with asyncio.timeout_at(self._deadline):
                return b"".join([chunk async for chunk in self.chunks()])
        except TimeoutError:
            pass
        finally:
            self.abort()
        raise UpstreamTimeout("no complete answer in time", Phase.MID_STREAM)

    def abort(self) -> None:
        connection = self._raw.connection  # None once the body was read to its end and the connection is back
        if connection is not None:
            if connection.transport is not None:
                connection.transport.abort()
            self._raw.close()


class AiohttpTransport:
    """A `Transport`; see there.

    `connect_secs` bounds resolving, connecting and the TLS handshake. `idle_secs` is how long an unused connection is
    kept: below the 5 s after which uvicorn, and so vLLM, closes it. `ssl_context` replaces the system's trust store.
    """

    def __init__(
        self, *, connect_secs: float = 10.0, idle_secs: float = 4.0, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._connect_secs = connect_secs
        self._idle_secs = idle_secs
        self._ssl = ssl_context
        self._sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession] | None = None
        self._closed = False

    async def request(
        self,
        endpoint: Endpoint,
        method: str,
        target: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_secs: float | None = None,
        fresh: bool = False,
    ) -> AiohttpResponse:
        rules.check_method(method)
        rules.check_target(target)
        url = URL(endpoint.base + target, encoded=True)
        lines = _lines(headers, endpoint.token())
        if body or method in rules.METHODS_WITH_BODY:
            lines.append(("Content-Length", str(len(body))))
        deadline = None if timeout_secs is None else asyncio.get_running_loop().time() + timeout_secs
        attempt = _Attempt()
        _attempt.set(attempt)
        pooled, unpooled = self._open()
        try:
            return await self._once(unpooled if fresh else pooled, attempt, deadline, method, url, lines, body)
        except _Stale:
            pass
        return await self._once(unpooled, attempt, deadline, method, url, lines, body)

    async def _once(
        self,
        session: aiohttp.ClientSession,
        attempt: _Attempt,
        deadline: float | None,
        method: str,
        url: URL,
        lines: list[tuple[str, str]],
        body: bytes,
    ) -> AiohttpResponse:
        if self._closed:
            raise UpstreamError("transport closed", attempt.phase)
        data = io.BytesIO(body) if len(body) > _PLAIN_BODY_LIMIT else body or None
        attempt.life, attempt.reused = _Life(), False
        try:
            async with asyncio.timeout_at(deadline):
                raw = await session.request(method, url, headers=lines, data=data, allow_redirects=False)
            return AiohttpResponse(raw, attempt.life, deadline)
        except (rules.BadFraming, aiohttp.ClientError, OSError) as exc:
            failure = _failure(exc, attempt)
            attempt.abort()
        except BaseException:
            attempt.abort()
            raise
        # Outside the handler, so that the library's exception (it can hold our headers) does not travel along.
        raise failure

    def _open(self) -> tuple[aiohttp.ClientSession, aiohttp.ClientSession]:
        if self._closed:
            raise UpstreamError("transport closed", Phase.NOT_SENT)
        if self._sessions is None:
            self._sessions = self._session(keepalive_timeout=self._idle_secs), self._session(force_close=True)
        return self._sessions

    def _session(self, **pool: Any) -> aiohttp.ClientSession:
        session = aiohttp.ClientSession(
            connector=_Connector(limit=0, ssl=self._ssl or True, **pool),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_secs, sock_read=None),
            skip_auto_headers=_AUTO_HEADERS,
            auto_decompress=False,
            trust_env=False,
            read_bufsize=_READ_BUFFER,
            max_line_size=_HEAD_LIMIT,
            max_field_size=_HEAD_LIMIT,
        )
        # Left alone, it repeats a broken GET by itself, also one that broke on a fresh connection.
        session._retry_connection = False
        return session

    async def close(self) -> None:
        self._closed = True
        if self._sessions is not None:
            for session in self._sessions:
                await session.close()


class _Stale(Exception):
    """The reused connection had been closed by the other side. Never leaves this file."""


def _lines(headers: Headers, token: str | None) -> list[tuple[str, str]]:
    kept = rules.upstream(headers)
    rules.block(kept)  # for its refusals
    # aiohttp writes header text as UTF-8, so what is not UTF-8 cannot pass unchanged.
    try:
        lines = [(name.decode("ascii"), value.decode()) for name, value in kept]
    except UnicodeDecodeError:
        raise BadRequest("a header value is not UTF-8") from None
    if token is not None:
        rules.check_token(token)
        lines.append(("Authorization", f"Bearer {token}"))
    return lines


def _failure(exc: Exception, attempt: _Attempt) -> Exception:
    if isinstance(exc, rules.BadFraming):
        return UpstreamError(str(exc), attempt.phase)
    if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ClientError):
        return UpstreamTimeout("no answer in time", attempt.phase)
    if attempt.reused and _closed_in_silence(exc):
        return _Stale()
    return UpstreamError(_words(exc), attempt.phase)


def _closed_in_silence(exc: BaseException) -> bool:
    if isinstance(exc, aiohttp.ServerDisconnectedError):
        return isinstance(exc.message, str)  # otherwise it is the part of the head that came
    return isinstance(_root(exc), ConnectionResetError | BrokenPipeError)


def _root(exc: BaseException) -> BaseException:
    """The operating system's exception in one of aiohttp's."""
    if isinstance(exc, aiohttp.ClientConnectorCertificateError):
        return exc.certificate_error
    if isinstance(exc, aiohttp.ClientConnectorError):
        return exc.os_error
    if isinstance(exc, aiohttp.ClientOSError):
        if exc.errno is None and exc.__cause__ is not None:  # while writing the body
            return exc.__cause__
        return exc if exc.errno is None else OSError(exc.errno, "")  # makes ConnectionResetError of ECONNRESET
    return exc


def _words(exc: BaseException) -> str:
    if isinstance(exc, aiohttp.ClientConnectorDNSError):
        return "name not resolved"
    if isinstance(exc, aiohttp.ServerDisconnectedError) or type(exc) is aiohttp.ClientConnectionError:
        return words(None)
    if isinstance(exc, aiohttp.ClientPayloadError):
        return "response cut short"
    return words(_root(exc))
