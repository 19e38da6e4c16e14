"""The lean transport's connections to one replica: request heads, the keep-alive pool, new connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.errors import Phase, UpstreamError, UpstreamTimeout
from proxy.upstream import headers as rules
from proxy.upstream.failures import words
from proxy.upstream.lean_connection import Connection
from proxy.upstream.transport import Headers

_REMEMBERED_STARTS = 64


@dataclass(frozen=True, slots=True)
class Address:
    """An endpoint's base, taken apart. `authority` is what the Host header says, `prefix` goes before each target."""

    host: str
    port: int
    tls: bool
    authority: str
    prefix: str

    @classmethod
    def of(cls, base: str) -> Address:
        """Raises UpstreamError(NOT_SENT) when `base` is no http(s) URL; settings are checked long before."""
        try:
            url = urlsplit(base)
            host, port = url.hostname, url.port
        except ValueError:
            host = port = None
        if not host or url.scheme not in ("http", "https") or url.username is not None or not base.isascii():
            raise UpstreamError("the address of this replica is not usable", Phase.NOT_SENT)
        tls = url.scheme == "https"
        name = f"[{host}]" if ":" in host else host
        usual = 443 if tls else 80
        authority = name if port in (None, usual) else f"{name}:{port}"
        return cls(host, port or usual, tls, authority, url.path.rstrip("/"))


class Pool:
    """Idle connections to one replica, the last used first; at most `idle_secs` old."""

    __slots__ = (
        "_address",
        "_auth_line",
        "_connect_secs",
        "_idle",
        "_idle_secs",
        "_loop",
        "_open",
        "_starts",
        "_sweeper",
        "_tls",
        "_token",
    )

    def __init__(
        self,
        address: Address,
        loop: asyncio.AbstractEventLoop,
        tls: Callable[[], ssl.SSLContext],
        *,
        connect_secs: float,
        idle_secs: float,
    ) -> None:
        self._address = address
        self._loop = loop
        self._tls = tls
        self._connect_secs = connect_secs
        self._idle_secs = idle_secs
        self._idle: dict[Connection, None] = {}  # by the time they came back, oldest first
        self._open: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._starts: dict[tuple[str, str], bytes] = {}  # (method, target) -> request line and Host
        self._token: str | None = None
        self._auth_line = b""

    def __len__(self) -> int:
        """Open connections, idle or not."""
        return len(self._open)

    # -- requests -----------------------------------------------------------------------------------------------------

    def head(self, method: str, target: str, headers: Headers, token: str | None, length: int) -> bytes:
        """Request line and header block. Raises BadRequest for what may not be sent."""
        start = self._starts.get((method, target)) or self._start(method, target)
        if token != self._token:
            self._use(token)
        if length or method in rules.METHODS_WITH_BODY:
            start += b"content-length: %d\r\n" % length
        return b"%b%b%b\r\n" % (start, self._auth_line, rules.block(rules.upstream(headers)))

    def _start(self, method: str, target: str) -> bytes:
        rules.check_method(method)
        rules.check_target(target)
        address = self._address
        start = f"{method} {address.prefix}{target} HTTP/1.1\r\nhost: {address.authority}\r\n".encode("ascii")
        if len(self._starts) < _REMEMBERED_STARTS:
            self._starts[method, target] = start
        return start

    def _use(self, token: str | None) -> None:
        if token is not None:
            rules.check_token(token)
        self._token = token
        self._auth_line = b"" if token is None else b"authorization: Bearer %b\r\n" % token.encode()

    # -- connections --------------------------------------------------------------------------------------------------

    def take(self) -> Connection | None:
        """The idle connection that was used last, or None."""
        if not self._idle:
            return None
        connection, _ = self._idle.popitem()
        if self._loop.time() - connection.idle_since < self._idle_secs:
            return connection
        connection.abort()
        while self._idle:  # the youngest was too old, so all are
            self._idle.popitem()[0].abort()
        return None

    async def connect(self, deadline: float | None) -> Connection:
        """A new connection. Raises UpstreamError(NOT_SENT); UpstreamTimeout when `deadline` (loop time) passed."""
        latest = self._loop.time() + self._connect_secs
        address = self._address
        try:
            async with asyncio.timeout_at(latest if deadline is None else min(latest, deadline)):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self),
                    address.host,
                    address.port,
                    ssl=self._tls() if address.tls else None,
                    server_hostname=address.host if address.tls else None,
                )
                return connection
        except OSError as exc:
            said = words(exc)
            late = isinstance(exc, TimeoutError) and deadline is not None and deadline <= latest
        except UnicodeError:
            said, late = "name not resolved", False
        raise (UpstreamTimeout if late else UpstreamError)(said, Phase.NOT_SENT)

    def free(self, connection: Connection) -> None:
        connection.idle_since = self._loop.time()
        self._idle[connection] = None
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._idle_secs, self._sweep)

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def lost(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._open.discard(connection)

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = self._loop.time() - self._idle_secs
        for connection in list(self._idle):
            if connection.idle_since > oldest:
                self._sweeper = self._loop.call_at(connection.idle_since + self._idle_secs, self._sweep)
                break
            del self._idle[connection]
            connection.abort()

    def close(self) -> None:
        """Close every connection at once; what they carried fails."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        self._idle.clear()
        for connection in list(self._open):
            connection.shut()
