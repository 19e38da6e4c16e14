"""What a replica says, made fit to be passed on: without its token and without its address."""

from __future__ import annotations

from urllib.parse import urlsplit

from proxy.upstream.transport import Endpoint

MAX_SAID = 500
"""Characters of a replica's words that are kept."""


def discreet(said: str, endpoint: Endpoint) -> str:
    """`said` with the endpoint's token and address struck out, at most MAX_SAID characters long.

    Gateways write the address they could not reach into their error pages, and some servers repeat the credentials
    they refused.
    """
    token = endpoint.token()
    if token:
        said = said.replace(token, "***")
    for name in _names(endpoint.base):
        if name:
            said = said.replace(name, "(replica)")
    return said[:MAX_SAID]


def _names(base: str) -> list[str]:
    """The ways to write where a replica is, longest first."""
    try:
        parts = urlsplit(base)
        return [base, parts.netloc, parts.hostname or ""]
    except ValueError:
        return [base]
