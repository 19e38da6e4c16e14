"""What the rest of lorafleet knows of the network: the interface that every transport has.

Two implementations: `aiohttp_transport` (the safe one) and `lean_transport` (fewer layers on the hot path). One test
suite runs on both. Both translate every foreign exception into `proxy.errors.UpstreamError` with the phase it broke in.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]
"""Header lines as on the wire, lower-case names, in order, duplicates kept."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica is. `token` is asked on every call, so that a changed token file takes effect at once.

    `base` has no trailing slash and may carry a path prefix (`https://host:8443/replica-0`). The repr shows no token.
    """

    base: str
    token: Callable[[], str | None] = lambda: None

    def __repr__(self) -> str:
        return f"Endpoint({self.base})"


class UpstreamResponse(Protocol):
    """A response whose head has arrived. Exactly one of: read `chunks()` to the end, `read()`, or `abort()`.

    `whole()` is a short cut: the entire body if it has arrived already, and then the response is done; else None, and
    nothing has happened. `content_length` is None when the head does not say. Bodies are never decompressed. After the
    last chunk the connection goes back to the pool by itself; `abort()` closes it at once (that is how a replica learns
    that the client left) and may be called at any time, more than once, from a `finally`.
    """

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def content_length(self) -> int | None: ...

    def whole(self) -> bytes | None: ...

    def chunks(self) -> AsyncIterator[bytes]: ...

    async def read(self) -> bytes: ...

    def abort(self) -> None: ...


class Transport(Protocol):
    """Sends requests to replicas. Never follows a redirect, never reads proxies or credentials from the environment.

    `request` adds Host, Content-Length and Authorization (from the endpoint) and drops hop-by-hop headers; `target` is
    the raw path and query as the client wrote it, beginning with "/". No total timeout unless `timeout_secs` is given:
    then the head must arrive, and `read()` end, within that many seconds of the call. Cancelling the call at any await
    closes the connection. A reused connection that the replica closed before any response byte is replayed once on a
    fresh one (keep-alive race); otherwise raises UpstreamError(NOT_SENT | MAYBE_SENT), or MID_STREAM from `chunks()`.
    `fresh` takes a new connection from the start, so that nothing is sent twice: for calls that change something, whose
    caller must know when an answer was lost.
    """

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
    ) -> UpstreamResponse: ...

    async def close(self) -> None: ...
