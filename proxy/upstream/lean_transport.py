"""The quick transport: asyncio protocols and httptools, with a keep-alive pool of its own.

It has the same interface and the same tests as the aiohttp one, and about a quarter of its cost a request, because
nothing here is general: HTTP/1.1 without proxies, cookies, redirects or decompression.
"""

from __future__ import annotations

import asyncio
import ssl

from proxy.errors import Phase, UpstreamError
from proxy.upstream.lean_pool import Address, Pool
from proxy.upstream.lean_response import LeanResponse
from proxy.upstream.transport import Endpoint, Headers

_CLOSE_TURNS = 100  # turns of the event loop that close() waits for sockets to be closed; two are usual


class LeanTransport:
    """A `Transport`; see there. Belongs to the event loop of its first request.

    `connect_secs` bounds resolving, connecting and the TLS handshake. `idle_secs` is how long an unused connection is
    kept: below the 5 s after which uvicorn, and so vLLM, closes it. `ssl_context` replaces the system's trust store.
    """

    def __init__(
        self, *, connect_secs: float = 10.0, idle_secs: float = 4.0, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._connect_secs = connect_secs
        self._idle_secs = idle_secs
        self._ssl_context = ssl_context
        self._pools: dict[str, Pool] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
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
    ) -> LeanResponse:
        pool = self._pools.get(endpoint.base)
        if pool is None:
            pool = self._open(endpoint.base)
        loop = self._loop
        assert loop is not None
        head = pool.head(method, target, headers, endpoint.token(), len(body))
        deadline = None if timeout_secs is None else loop.time() + timeout_secs
        connection = None if fresh else pool.take()
        repeated = False
        if connection is not None:
            response = LeanResponse(loop, method, deadline)
            connection.send(response, head, body)
            if await response.head():
                return response
            repeated = True
        try:
            connection = await pool.connect(deadline)
        except UpstreamError as error:
            if repeated:
                error.phase = Phase.MAYBE_SENT  # the stale connection took the request
            raise
        if self._closed:
            connection.abort()
            raise UpstreamError("transport closed", Phase.NOT_SENT)
        response = LeanResponse(loop, method, deadline)
        connection.send(response, head, body)
        await response.head()
        return response

    def _open(self, base: str) -> Pool:
        if self._closed:
            raise UpstreamError("transport closed", Phase.NOT_SENT)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        pool = Pool(Address.of(base), self._loop, self._tls, connect_secs=self._connect_secs, idle_secs=self._idle_secs)
        self._pools[base] = pool
        return pool

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    async def close(self) -> None:
        self._closed = True
        pools = list(self._pools.values())
        self._pools.clear()
        for pool in pools:
            pool.close()
        for _ in range(_CLOSE_TURNS):
            if not any(map(len, pools)):
                break
            await asyncio.sleep(0)
