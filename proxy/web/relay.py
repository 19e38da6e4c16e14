"""Passing one replica's answer on to the client: chunk by chunk, as it comes, and reading afterwards what it said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from proxy.errors import Phase, UpstreamError
from proxy.lease import Served
from proxy.upstream import headers as rules
from proxy.upstream.transport import Headers, UpstreamResponse
from proxy.web import usage
from proxy.web.asgi import Message, Send
from proxy.web.rewrite import GiveBack
from proxy.web.usage_scan import TAIL

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
        began: Callable[[], None],
        completed: Callable[[], None],
    ) -> None:
        """Send head and body. `body` is the whole body if it has been read already, `stamps` are our header lines.

        The head waits for the first byte of the body: engines send the head of a stream when they queue the request,
        and as long as the client knows nothing, another replica can take over. `began` is called then, `completed` when
        nothing more is wanted of the replica. Raises UpstreamError if it breaks off.
        """
        status = response.status
        headers, media, coded, back = opening(response, served)
        if back is not None:
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
        start = {"type": "http.response.start", "status": status, "headers": headers}
        learn = learn and status == 200 and not coded
        if body is None:
            kept = await self._stream(response, start, back, began, media if learn else b"")
            last = back.rest() if back is not None else b""
        else:
            began()
            self.status = status
            await self._send(start)
            kept = [body]
            last = body
        self.complete = True
        completed()
        self.sent += len(last)
        await self._send({"type": "http.response.body", "body": last})
        if learn and kept:
            if self.sent >= YIELD_FROM:
                await asyncio.sleep(0)
            self.learned = usage.read(media, kept)

    async def _stream(
        self,
        response: UpstreamResponse,
        start: Message,
        back: GiveBack | None,
        began: Callable[[], None],
        media: bytes,
    ) -> list[bytes]:
        """Send the head and the chunks as they come. Returns what there is to learn from, by the media type."""
        send = self._send
        kept = _Kept(media)
        async for chunk in response.chunks():
            if self.status is None:
                began()
                self.status = start["status"]
                await send(start)
            if back is not None:
                chunk = back.feed(chunk)
                if not chunk:
                    continue
            self.sent += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            kept.add(chunk)
        if self.status is None:
            began()
            self.status = start["status"]
            await send(start)
        return kept.chunks


class Opening(NamedTuple):
    """The head of an answer, read: the lines for the client, the media type, whether the body is compressed, and what
    puts the client's name back into it (None: nothing to put back, or compressed)."""

    headers: list[tuple[bytes, bytes]]
    media: bytes
    coded: bool
    back: GiveBack | None


def opening(response: UpstreamResponse, served: Served | None) -> Opening:
    """Raises UpstreamError for a status that no final answer has."""
    status = response.status
    if not 200 <= status < 600:
        raise UpstreamError(f"the replica answered with status {status}", Phase.MAYBE_SENT)
    headers = rules.downstream(response.headers)
    media, coded = content_type(headers)
    renamed = served is not None and served.name != served.upstream and not coded
    back = GiveBack(served.upstream, served.name, anywhere=status >= 400) if served is not None and renamed else None
    return Opening(headers, media, coded, back)


class _Kept:
    """The chunks of a JSON answer unless they become too many, or the last ones of an event stream."""

    __slots__ = ("_limit", "_size", "_tail", "chunks")

    def __init__(self, media: bytes) -> None:
        self.chunks: list[bytes] = []
        self._size = 0
        self._tail = media.startswith(b"text/event-stream")
        self._limit = TAIL if self._tail else usage.LIMIT if media else 0

    def add(self, chunk: bytes) -> None:
        if not self._limit:
            return
        self.chunks.append(chunk)
        self._size += len(chunk)
        if self._size > self._limit:
            if self._tail:
                while self._size - len(self.chunks[0]) >= self._limit:
                    self._size -= len(self.chunks.pop(0))
            else:
                self.chunks, self._limit = [], 0


def content_type(headers: Headers) -> tuple[bytes, bool]:
    """The media type, lower case, and whether the body is compressed."""
    media, coded = b"", False
    for name, value in headers:
        if name == b"content-type":
            media = value.lower()
        elif name == b"content-encoding":
            coded = value.lower() != b"identity"
    return media, coded
