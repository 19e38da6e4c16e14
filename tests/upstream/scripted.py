"""A server whose every byte is scripted, and the small things that tests of transports need."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from proxy.upstream.transport import Endpoint

PATIENCE = 20.0  # seconds after which a condition counts as never coming true
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@dataclass(frozen=True)
class Received:
    """One request as the server saw it; header names as on the wire."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]


class Peer:
    """The server's end of one connection."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self.number = len(server.peers)

    async def head(self) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        raw = await self._reader.readuntil(b"\r\n\r\n")
        line, *rest = raw[:-4].split(b"\r\n")
        fields = [(name, value.strip()) for name, _, value in (each.partition(b":") for each in rest)]
        return line, fields

    async def request(self) -> Received:
        """Read one whole request and note it in `server.requests`."""
        line, headers = await self.head()
        size = sum(int(value) for name, value in headers if name.lower() == b"content-length")
        received = Received(line, headers, await self._reader.readexactly(size))
        self._server.requests.append(received)
        return received

    async def say(self, *pieces: bytes) -> None:
        """Send each piece by itself."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Wait until the client has closed or reset the connection."""
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while await self._reader.read(1 << 16):
                    pass

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close with RST."""
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Peer], Awaitable[None]]


@dataclass
class Server:
    """`peers` are the connections in the order they came; `open` counts those whose script still runs."""

    port: int = 0
    tls: bool = False
    peers: list[Peer] = field(default_factory=list)
    requests: list[Received] = field(default_factory=list)
    open: int = 0
    listener: asyncio.Server | None = None

    def stop_listening(self) -> None:
        assert self.listener is not None
        self.listener.close()

    def endpoint(self, token: str | None = None, prefix: str = "") -> Endpoint:
        scheme, host = ("https", "localhost") if self.tls else ("http", "127.0.0.1")
        return Endpoint(f"{scheme}://{host}:{self.port}{prefix}", lambda: token)


@contextlib.asynccontextmanager
async def serving(script: Script, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run `script` on each connection; when it returns, the connection is closed."""
    server = Server(tls=tls is not None)
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(server, reader, writer)
        server.peers.append(peer)
        server.open += 1
        try:
            await script(peer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            server.open -= 1
            writer.close()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(run(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accepted, "127.0.0.1", 0, ssl=tls, backlog=512, limit=1 << 20)
    server.listener = listener
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.wait_closed()


def answering(*replies: bytes) -> Script:
    """Read a request and send the next reply, over and over; the last reply is repeated. Counts over connections."""
    given = iter(replies)
    last = [replies[-1]]

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            last[0] = next(given, last[0])
            await peer.say(last[0])

    return script


def once(*pieces: bytes) -> Script:
    """Read a request, send the pieces, close."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.say(*pieces)

    return script


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


def descriptors() -> int:
    """Open sockets of this process."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def refused_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
