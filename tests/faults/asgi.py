"""Asking an ASGI application without a socket, as a client would: answers, half answers, leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

BOUND_SECS = 60.0
"""A request that takes longer hangs. Far above what any takes on a busy machine."""

JSON = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got. `status` is None when the connection closed before the head, `whole` is False when it closed
    before the end."""

    status: int | None
    headers: dict[str, str]
    body: bytes
    whole: bool

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.whole

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        return json.loads(self.body)


async def ask(
    app: Any,
    method: str,
    target: str,
    body: Any = None,
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
    leave: asyncio.Event | None = None,
    host: bytes = b"proxy.test",
) -> Answer:
    """One request. `body`: bytes as they are, anything else as JSON. With `leave` the client goes away when it is set.

    Raises AssertionError for a request that hangs; what the application raises comes through.
    """
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    path, _, query = target.partition("?")
    sent = path.encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"),
        "raw_path": sent,
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (b"host", host),
            *([JSON] if data else []),
            *([(b"content-length", b"%d" % len(data))] if data or method == "POST" else []),
            *headers,
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    whole_body = [data]
    status: int | None = None
    lines: dict[str, str] = {}
    pieces: list[bytes] = []
    whole = False

    async def receive() -> dict[str, Any]:
        if whole_body:
            return {"type": "http.request", "body": whole_body.pop(), "more_body": False}
        await asyncio.shield(over)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, whole
        if message["type"] == "http.response.start":
            status = message["status"]
            lines.update((name.decode().lower(), value.decode("latin-1")) for name, value in message["headers"])
        else:
            pieces.append(message.get("body", b""))
            whole = not message.get("more_body", False)

    async def leaving() -> None:
        assert leave is not None
        await leave.wait()
        if not over.done():
            over.set_result(None)

    watcher = asyncio.create_task(leaving()) if leave is not None else None
    try:
        async with asyncio.timeout(BOUND_SECS):
            await app(scope, receive, send)
    except TimeoutError:
        raise AssertionError(f"{method} {target} {data[:200]!r} hangs") from None
    finally:
        if watcher is not None:
            watcher.cancel()
        if not over.done():
            over.set_result(None)
    return Answer(status, lines, b"".join(pieces), whole)
