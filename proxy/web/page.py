"""The status page at GET /: one file, read once, served with a policy that lets nothing in it come from elsewhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from proxy.upstream.transport import Headers
from proxy.web.asgi import Receive, Scope, Send

_INLINE = {tag: re.compile(rf"<{tag}>(.*?)</{tag}>", re.DOTALL) for tag in ("script", "style")}


@dataclass(frozen=True, slots=True)
class Page:
    """The bytes and how they are served. `etag` is a strong validator in its quotes."""

    body: bytes
    etag: bytes
    headers: Headers


@functools.cache
def page() -> Page:
    """The page as installed. It holds no data and no secret: what it shows it asks of /fleet, with the viewer's key."""
    return build((files("proxy.web") / "page.html").read_bytes())


def build(body: bytes) -> Page:
    """Headers for a page whose only script and style are inline; its policy allows exactly these, by their hashes."""
    text = body.decode()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(_INLINE['script'].findall(text))}",
            f"style-src {_hashes(_INLINE['style'].findall(text))}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    etag = b'"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
    return Page(
        body,
        etag,
        (
            (b"content-type", b"text/html; charset=utf-8"),
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cache-control", b"no-cache"),
            (b"etag", etag),
        ),
    )


async def status_page(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application: GET and HEAD, 304 when the client has this very page."""
    served = page()
    unchanged = any(
        name == b"if-none-match" and (value.strip() == b"*" or served.etag in value) for name, value in scope["headers"]
    )
    headers = list(served.headers)
    if not unchanged:
        headers.append((b"content-length", b"%d" % len(served.body)))
    body = b"" if unchanged or scope["method"] == "HEAD" else served.body
    await send({"type": "http.response.start", "status": 304 if unchanged else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _hashes(sources: Iterable[str]) -> str:
    digests = (hashlib.sha256(source.encode()).digest() for source in sources)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
