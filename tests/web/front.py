"""The data path behind the real server, in front of replicas that a test made."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.control.desired import Adapter, Desired
from proxy.control.facts import Facts
from proxy.fleet import Fleet
from proxy.replica_state import Event
from proxy.routing.router import Router
from proxy.upstream.aiohttp_transport import AiohttpTransport
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint, Transport
from proxy.web.asgi import Receive, Scope, Send
from proxy.web.client_connection import ClientConnection
from proxy.web.forward import Forwarder, ForwardSettings
from proxy.web.observe import Outcome, Silent

FACTS = Facts(base_models=("base",), base_root="/m", max_model_len=4096, block_size=16, kv_capacity_tokens=100_000)


make_transport: Callable[[], Transport] = LeanTransport


@pytest.fixture(autouse=True, params=[LeanTransport, AiohttpTransport])
def each_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported by a test module, it runs its tests on both transports."""
    monkeypatch.setattr("tests.web.front.make_transport", request.param)


class Notes(Silent):
    """Remembers what the data path told."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.retries: list[tuple[int, str]] = []
        self.departures: list[str] = []
        self.now_waiting = 0

    def finished(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    def retried(self, replica: int, reason: str) -> None:
        self.retries.append((replica, reason))

    def client_left(self, phase: str) -> None:
        self.departures.append(phase)

    def waiting(self, count: int) -> None:
        self.now_waiting = count


@dataclass
class Front:
    """A running proxy: only its data path."""

    fleet: Fleet
    forwarder: Forwarder
    notes: Notes
    port: int = 0
    errors: list[BaseException] = field(default_factory=list)
    began: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ready(self, *indices: int) -> None:
        for index in indices or range(len(self.fleet.replicas)):
            self.fleet.learn(index, FACTS)
            self.fleet.apply(index, Event.CAUGHT_UP)

    def bind(self, *adapters: Adapter) -> None:
        """Commit bindings that every replica holds."""
        desired = self.fleet.desired
        for adapter in adapters:
            desired = desired.bind(adapter)
            for replica in self.fleet.replicas:
                replica.holds[adapter.upstream] = adapter.path
        self.commit(desired)

    def commit(self, desired: Desired) -> None:
        """Make it so, on replicas that have been paused or resumed already."""
        for replica in self.fleet.replicas:
            replica.paused = desired.pause is not None and desired.pause.real
        self.fleet.commit(desired)

    def at_rest(self) -> bool:
        """Nothing is held, counted or waiting anywhere."""
        fleet = self.fleet
        return (
            not any(replica.leases or replica.running for replica in fleet.replicas)
            and not fleet.running
            and not len(self.forwarder.gate)
            and not self.forwarder.errands.running
            and fleet.router.counters()["in_flight"] == 0
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.began += 1
        run = self.forwarder.completion if scope["path"] in ROUTED else self.forwarder.to_any
        try:
            await run(scope, receive, send)
        except BaseException as exc:
            self.errors.append(exc)
            raise


ROUTED = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}


def commit(fleet: Fleet, desired: Desired) -> None:
    """Commit, with replicas that have done already what is wanted."""
    for replica in fleet.replicas:
        fleet.set_paused(replica.index, desired.pause is not None and desired.pause.real)
    fleet.commit(desired)


@contextlib.asynccontextmanager
async def front(replicas: Sequence[str | Endpoint], *, ready: bool = True, **settings: Any) -> AsyncIterator[Front]:
    """A proxy on a free port in front of `replicas`. At the end it must be at rest, with no exception on the way."""
    fleet = Fleet([Endpoint(it) if isinstance(it, str) else it for it in replicas], Router())
    transport = make_transport()
    notes = Notes()
    it = Front(fleet, Forwarder(fleet, transport, ForwardSettings(**settings), notes), notes)
    if ready:
        it.ready()
    server, state = await serve(it.app)
    it.port = server.sockets[0].getsockname()[1]
    try:
        yield it
        await until(it.at_rest)
        assert not it.errors
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        await transport.close()


async def serve(app: Any) -> tuple[asyncio.Server, ServerState]:
    """The server's protocol on a free port, without the process around it (signals, ticks)."""
    config = uvicorn.Config(app, http=ClientConnection, interface="asgi3", lifespan="off", log_config=None, ws="none")
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(config=config, server_state=state, app_state={}), "127.0.0.1", 0, backlog=2048
    )
    return server, state


async def until(condition: Callable[[], Any], secs: float = 20) -> None:
    """Wait for a condition of the same loop."""
    async with asyncio.timeout(secs):
        while not condition():
            await asyncio.sleep(0.002)


class Client:
    """A socket, for what a client library would hide: what exactly came, how it ended, leaving at a chosen moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, it: Front) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", it.port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, body: Any, path: str = "/v1/completions", *lines: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = (f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}")
        self.send("\r\n".join((*head, *lines, "", "")).encode() + data)

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(20):
            return await self.reader.readuntil(text)

    async def rest(self) -> bytes:
        """All that comes until the other side closes, in whatever way."""
        data = b""
        try:
            async with asyncio.timeout(20):
                while chunk := await self.reader.read(65536):
                    data += chunk
        except ConnectionError:
            pass
        return data

    async def count(self, letter: bytes, until: int) -> None:
        """Read until `letter` came so many times."""
        seen = 0
        async with asyncio.timeout(20):
            while seen < until:
                chunk = await self.reader.read(1 << 16)
                assert chunk
                seen += chunk.count(letter)

    def leave(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        sock: socket.socket = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()
