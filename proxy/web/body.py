"""Reading a request's body whole, within a limit, and refusing one that is too large so that the client hears it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.errors import BadRequest, BodyTooLarge, LorafleetError
from proxy.web.asgi import CLOSE, Receive, Scope, Send, send_error

LINGER_SECS = 5.0
LINGER_BYTES = 64 << 20


def declared_length(scope: Scope) -> int | None:
    """The Content-Length, None for a chunked body or none at all.

    Raises BadRequest when two readers could disagree where the body ends (RFC 9112 section 6.3). The parser in front
    refuses these as well; a request that reaches a replica must not depend on that.
    """
    length: int | None = None
    coded = False
    for name, value in scope["headers"]:
        if name == b"content-length":
            if length is not None or coded or not value.isdigit():
                raise BadRequest("ambiguous Content-Length")
            length = int(value)
        elif name == b"transfer-encoding":
            if length is not None or coded or value.strip().lower() != b"chunked":
                raise BadRequest("ambiguous or unknown Transfer-Encoding")
            coded = True
    return length


async def read_body(
    scope: Scope, receive: Receive, send: Send, limit: int, left: Callable[[str], None]
) -> bytes | None:
    """The whole body. None when there is nothing to go on with: the client was refused with 400 or 413, or it went
    away (`left("body")`).

    A body over `limit` bytes is refused at once when its length is declared, else as soon as it is over; the
    connection is then closed.
    """
    try:
        length = declared_length(scope)
    except BadRequest as error:
        await _refuse(scope, receive, send, error)
        return None
    if length is not None and length > limit:
        await _refuse(scope, receive, send, _too_large(limit))
        return None
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            left("body")
            return None
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size > limit:
            await _refuse(scope, receive, send, _too_large(limit), comes=more)
            return None
        if not more:
            return b"".join((*chunks, chunk)) if chunks else chunk
        chunks.append(chunk)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than the limit of {limit} bytes")


async def _refuse(scope: Scope, receive: Receive, send: Send, error: LorafleetError, *, comes: bool = True) -> None:
    """Answer, then close the connection, but not while the client still writes (`comes`).

    Closing a socket with unread bytes in it makes the kernel reset the connection, and the client may lose the answer
    that it has not read yet. So what it still sends is thrown away for a while.
    """
    if not comes or any(name == b"expect" for name, _ in scope["headers"]):
        await send_error(send, error, [CLOSE])
        return
    await send_error(send, error, [CLOSE], end=False)
    try:
        async with asyncio.timeout(LINGER_SECS):
            await _discard(receive)
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Receive) -> None:
    left = LINGER_BYTES
    while left > 0:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
        left -= len(message.get("body", b""))
