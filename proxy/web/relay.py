"""Passing one replica's answer on to the client: chunk by chunk, as it comes, and reading afterwards what it said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.errors import Phase, UpstreamError
from proxy.lease import Served
from proxy.upstream import headers as rules
from proxy.upstream.transport import Headers, UpstreamResponse
from proxy.web import usage
from proxy.web.asgi import Send
from proxy.web.rewrite import GiveBack

SMALL_ANSWER = 4 << 20
"""Bytes of an answer that are collected to give it a new Content-Length when a name in it changes; a larger one goes
on chunked."""

YIELD_FROM = 32 << 10
"""An answer of so many bytes is on its way to the client before anything is read from it."""


class Relay:
    """Where the answer stands. `status` is None until the head went to the client; then there is no way back.

    `complete` means that the replica has delivered all of it: it may die now, and the client may leave.
    """

    __slots__ = ("_send", "complete", "learned", "sent", "status")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.sent = 0
        self.complete = False
        self.learned = usage.NOTHING

    async def run(
        self,
        response: UpstreamResponse,
        body: bytes | None,
        served: Served | None,
        stamps: Headers,
        *,
        learn: bool,
        completed: Callable[[], None],
    ) -> None:
        """Send head and body. `body` is the whole body if it has been read already, `stamps` are our header lines.

        `completed` is called when nothing more is wanted of the replica. Raises UpstreamError if it breaks off.
        """
        status = response.status
        if not 200 <= status < 600:
            raise UpstreamError(f"the replica answered with status {status}", Phase.MAYBE_SENT)
        headers = rules.downstream(response.headers)
        content, coded = content_type(headers)
        back: GiveBack | None = None
        if served is not None and served.name != served.upstream and not coded:
            back = GiveBack(served.upstream, served.name, anywhere=status >= 400)
            headers = [line for line in headers if line[0] != b"content-length"]
            length = response.content_length
            if body is None and length is not None and length <= SMALL_ANSWER:
                body = await response.read()
            if body is not None:
                body = back.feed(body) + back.rest()
                headers.append((b"content-length", b"%d" % len(body)))
        elif body is None:
            body = response.whole()
        headers.extend(stamps)
        learn = learn and status == 200 and not coded
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        if body is not None:
            self.complete = True
            completed()
            self.sent = len(body)
            await self._send({"type": "http.response.body", "body": body})
            kept = [body]
        else:
            stream = content.startswith(b"text/event-stream")
            kept = await self._stream(response, back, usage.TAIL if stream else usage.LIMIT if learn else 0, stream)
            self.complete = True
            completed()
            rest = back.rest() if back is not None else b""
            self.sent += len(rest)
            await self._send({"type": "http.response.body", "body": rest})
        if learn and kept:
            if self.sent >= YIELD_FROM:
                await asyncio.sleep(0)
            self.learned = usage.read(content, kept)

    async def _stream(self, response: UpstreamResponse, back: GiveBack | None, limit: int, tail: bool) -> list[bytes]:
        """Send the chunks; return the last `limit` bytes (`tail`), or all of them if they are not more."""
        send = self._send
        kept: list[bytes] = []
        size = 0
        async for chunk in response.chunks():
            if back is not None:
                chunk = back.feed(chunk)
                if not chunk:
                    continue
            self.sent += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if limit:
                kept.append(chunk)
                size += len(chunk)
                if size > limit:
                    if not tail:
                        kept, limit = [], 0
                        continue
                    while size - len(kept[0]) >= limit:
                        size -= len(kept.pop(0))
        return kept


def content_type(headers: Headers) -> tuple[bytes, bool]:
    """The media type, lower case, and whether the body is compressed."""
    media, coded = b"", False
    for name, value in headers:
        if name == b"content-type":
            media = value.lower()
        elif name == b"content-encoding":
            coded = value.lower() != b"identity"
    return media, coded
