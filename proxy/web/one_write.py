"""uvicorn's HTTP protocol, writing an answer's head and the first bytes of its body to the socket at once.

uvicorn writes them one after the other, and uvloop sends what is written right away: two system calls and two packets
for every answer. Here whatever is written in one turn of the event loop goes out together at its end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOGETHER = 64 << 10
"""Bytes from which on a piece is not held back: copying it costs more than the system call, and the transport must see
its buffer grow to tell the application to wait."""

PIECES = 16


class OneWrite:
    """A transport in front of `transport`. Only what writing concerns is done here, the rest is passed on."""

    __slots__ = ("_held", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        held = self._held
        if len(data) >= TOGETHER:
            self.flush()
            self._transport.write(data)
        elif not held:
            held.append(data)
            self._loop.call_soon(self.flush)
        else:
            held.append(data)
            if len(held) == PIECES:
                self.flush()

    def flush(self) -> None:
        held = self._held
        if held:
            self._held = []
            if not self._transport.is_closing():
                self._transport.write(held[0] if len(held) == 1 else b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held = []
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class OneWriteProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=...)`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(OneWrite(transport, self.loop))  # type: ignore[arg-type]
