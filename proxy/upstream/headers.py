"""Which header lines cross the proxy, in each direction, and how a response says where its body ends.

Pure, and quick, because it runs on every request: each name's fate is looked up once and remembered.

Hop-by-hop fields go in neither direction (RFC 9110 section 7.6.1): the fixed list and whatever `Connection` names.
Upstream, what the client sent to prove who it is stays here: the replica gets the endpoint's token and nothing else
that could be taken for a credential. Downstream, what names the replica's own address stays here.
"""

from __future__ import annotations

import re

from proxy.errors import BadRequest, Phase, UpstreamError
from proxy.upstream.transport import Headers

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
METHODS_WITH_BODY = frozenset({"PATCH", "POST", "PUT"})
"""An empty body of these is announced with Content-Length: 0 (RFC 9110 section 8.6)."""

# Host and Content-Length are written anew. Expect has been answered by the server in front. The client's credentials
# are meant for the proxy. Addresses of clients are no business of a replica, which might trust them, too. A method is
# what the request line says, or a GET would be a way round lorafleet's own endpoints.
_NOT_UPSTREAM = HOP_BY_HOP | {
    b"authorization",
    b"content-length",
    b"cookie",
    b"cookie2",
    b"expect",
    b"forwarded",
    b"host",
    b"x-api-key",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-prefix",
    b"x-forwarded-proto",
    b"x-http-method",
    b"x-http-method-override",
    b"x-method-override",
    b"x-real-ip",
}

# What lorafleet tells its clients; a client that sends it back means nothing to a replica.
_OURS = b"x-lorafleet-"

# The server in front writes Date and Server itself. Alt-Svc offers the replica's own address.
_NOT_DOWNSTREAM = HOP_BY_HOP | {b"alt-svc", b"date", b"server"}
_NAMES_A_PLACE = frozenset({b"content-location", b"location"})

_LISTS_NOTHING = frozenset({b"close", b"keep-alive", b"Keep-Alive"})
_COLON = b": "

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(r"/[!\"$-~]*")  # every visible character but "#"
_VISIBLE = re.compile(r"[!-~]+")
_LONGEST_LENGTH = 18  # digits
_REMEMBERED_NAMES = 1024


class _Fates(dict[bytes, bool]):
    """Name as it came -> whether it goes upstream. Only well-formed names are remembered."""

    def __missing__(self, name: bytes) -> bool:
        if not _TOKEN.fullmatch(name):
            raise BadRequest("a header name has a character that is not allowed")
        lower = name.lower()
        goes = lower not in _NOT_UPSTREAM and not lower.startswith(_OURS)
        if len(self) < _REMEMBERED_NAMES:
            self[name] = goes
        return goes


_goes_upstream = _Fates()


class BadFraming(Exception):
    """A response that must not be believed. The message is short and holds nothing of the response."""


def check_token(token: str) -> None:
    """Refuse a token that could end its header line. The message does not show it."""
    if not _VISIBLE.fullmatch(token):
        raise UpstreamError("the token for this replica has a character that is not allowed", Phase.NOT_SENT)


def check_method(method: str) -> None:
    """Refuse any method but the seven that a replica may get. TRACE would answer with the token in the body."""
    if method not in METHODS:
        raise BadRequest("the request method is not supported")


def check_target(target: str) -> None:
    """Refuse a request target that is not an absolute path in visible ASCII without a fragment.

    Raises BadRequest; a line break here would let a client write a request of its own to the replica.
    """
    if not _TARGET.fullmatch(target):
        raise BadRequest("the request target has a character that is not allowed")


def upstream(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The client's header lines that a replica may see, in order, duplicates kept. Values are `block`'s to check.

    Raises BadRequest on a malformed name.
    """
    fates = _goes_upstream
    return _without_listed([line for line in headers if fates[line[0]]], headers)


def downstream(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The replica's header lines that the client sees. Right only if the body is passed on byte for byte:
    Content-Length and Content-Encoding are kept. A Location that names a host is left out: it would be the replica's.
    """
    kept = [line for line in headers if line[0] not in _NOT_DOWNSTREAM]
    for name, value in kept:
        if name in _NAMES_A_PLACE and b"//" in value:
            kept = [line for line in kept if line[0] not in _NAMES_A_PLACE or b"//" not in line[1]]
            break
    return _without_listed(kept, headers)


def _without_listed(kept: list[tuple[bytes, bytes]], headers: Headers) -> list[tuple[bytes, bytes]]:
    values = [value for name, value in headers if name == b"connection"]
    if not values or (values[0] in _LISTS_NOTHING and len(values) == 1):
        return kept
    listed = {name.strip() for name in b",".join(values).lower().split(b",")}
    return [line for line in kept if line[0].lower() not in listed]


def block(lines: Headers) -> bytes:
    """The lines as they go on the wire, each with its end. Raises BadRequest when a value has a line break or NUL."""
    joined = b"\r\n".join([*map(_COLON.join, lines), b""])
    if not joined.count(b"\n") == joined.count(b"\r") == len(lines) or b"\0" in joined:
        raise BadRequest("a header value has a line break in it")
    return joined


def framing(status: int, headers: Headers) -> tuple[int | None, bool]:
    """(Content-Length or None, chunked) of a final response.

    Raises BadFraming when two readers could disagree about where the body ends: both headers, two lengths, a length
    that is no number, a transfer coding other than `chunked` (RFC 9112 section 6), or a change of protocol.
    """
    if status < 200:
        raise BadFraming("unasked change of protocol")
    length: bytes | None = None
    chunked = False
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not value.isdigit() or len(value) > _LONGEST_LENGTH:
                raise BadFraming("ambiguous Content-Length")
            length = value
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise BadFraming("unknown Transfer-Encoding")
            chunked = True
    if length is None:
        return None, chunked
    if chunked:
        raise BadFraming("both Content-Length and Transfer-Encoding")
    return int(length), False
