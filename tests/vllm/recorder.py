"""A passthrough that writes down who asked for what: put between the trainer and the proxy, it sees what TRL sees."""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from aiohttp import web

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request and its answer; times are of time.monotonic(), `status` is 0 when no answer came."""

    method: str
    path: str
    body: dict[str, Any]
    query: dict[str, str]
    status: int
    answer: dict[str, Any]
    headers: dict[str, str]
    started: float
    ended: float

    @property
    def model(self) -> str:
        return str(self.body.get("model"))

    @property
    def adapter(self) -> str:
        return str(self.body.get("lora_name"))


class Recorder:
    """Listens on a loopback port while its `async with` lasts; forwards to `upstream`, with `token` when given."""

    def __init__(self, upstream: str, token: str | None = None) -> None:
        self.calls: list[Call] = []
        self.url = ""
        self._upstream = upstream
        self._extra = {"authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    def of(self, path: str) -> list[Call]:
        """The calls to `path`, in the order in which they were answered."""
        return [call for call in self.calls if call.path == path]

    async def _forward(self, request: web.Request) -> web.Response:
        started, body = time.monotonic(), await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP} | self._extra
        status, answer, got = 0, b"", {}
        try:
            async with self._session.request(
                request.method, f"{self._upstream}{request.rel_url}", data=body, headers=headers
            ) as response:
                status, answer = response.status, await response.read()
                got = {k.lower(): v for k, v in response.headers.items() if k.lower() not in _HOP_BY_HOP}
        except (aiohttp.ClientError, asyncio.CancelledError) as failure:
            if isinstance(failure, asyncio.CancelledError):
                raise
        finally:
            self.calls.append(
                Call(
                    method=request.method,
                    path=request.path,
                    body=_json(body),
                    query=dict(request.query),
                    status=status,
                    answer=_json(answer),
                    headers=got,
                    started=started,
                    ended=time.monotonic(),
                )
            )
        if not status:  # what the trainer would have seen: a connection that breaks
            if request.transport is not None:
                request.transport.abort()
            raise web.HTTPBadGateway
        return web.Response(status=status, body=answer, headers=got)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
