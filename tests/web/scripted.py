"""Replicas that do byte for byte what a test says, for the faults that no well-meant server can make."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Self

ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "model": "base",
    "choices": [{"index": 0, "text": "ok", "token_ids": [7, 8], "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
}


class Call:
    """One request that a replica got, and the means to answer it, well or badly."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, _ = lines[0].split(" ", 2)
        self.headers = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
        self.body = body
        self.left = asyncio.Event()
        self.on_connection = 1
        """Which request of its connection this is."""
        self._reader = reader
        self._writer = writer

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def json(self) -> Any:
        return json.loads(self.body)

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()

    def head(self, status: int = 200, *lines: str) -> None:
        self.write("\r\n".join((f"HTTP/1.1 {status} Reason", *lines, "", "")).encode())

    def answer(self, body: Any = ANSWER, status: int = 200, *lines: str, media: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
        self.head(status, f"content-type: {media}", f"content-length: {len(data)}", *lines)
        if self.method != "HEAD":
            self.write(data)

    def no_such_model(self) -> None:
        message = f"The model `{self.json()['model']}` does not exist."
        error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
        self.answer({"error": error}, 404)

    def stream(self) -> None:
        self.head(200, "content-type: text/event-stream; charset=utf-8", "transfer-encoding: chunked")

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, **fields: Any) -> None:
        self.chunk(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")

    def end(self) -> None:
        self.write(b"0\r\n\r\n")

    def reset(self) -> None:
        """Cut with a TCP reset."""
        sock: socket.socket = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def hang(self) -> None:
        """Until the proxy closes the connection."""
        try:
            await self._reader.read()
        except ConnectionError:
            pass
        self.left.set()


Script = Callable[[Call], Awaitable[None] | None]


class Scripted:
    """A server on a free port that runs `script` for each request; `calls` are those that it got."""

    def __init__(self, script: Script = Call.answer) -> None:
        self.script = script
        self.calls: list[Call] = []
        self.port = 0
        self._server: asyncio.Server | None = None
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse new connections and cut the old ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def got(self, count: int) -> Call:
        """Wait for the `count`-th call (from 1)."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.calls) >= count)
        return self.calls[count - 1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        served = 0
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                call = Call(head[:-4], await reader.readexactly(length), reader, writer)
                call.on_connection = served = served + 1
                self.calls.append(call)
                async with self._arrived:
                    self._arrived.notify_all()
                pending = self.script(call)
                if pending is not None:
                    await pending
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
