"""The table from foreign exceptions to words that may be shown: short, without address, header or token."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl

_WORDS: tuple[tuple[type[BaseException], str], ...] = (
    (ssl.SSLCertVerificationError, "certificate not trusted"),
    (ssl.SSLError, "TLS failed"),
    (socket.gaierror, "name not resolved"),
    (ConnectionRefusedError, "connection refused"),
    (ConnectionResetError, "connection reset"),
    (BrokenPipeError, "connection reset"),
    (ConnectionAbortedError, "connection reset"),
    (asyncio.IncompleteReadError, "connection closed"),
    (TimeoutError, "no connection in time"),
)
"""First match wins, so subclasses stand above what they derive from."""


def words(exc: BaseException | None) -> str:
    """What happened, in two or three words. None is an orderly close by the other side."""
    if exc is None:
        return "connection closed"
    for kind, said in _WORDS:
        if isinstance(exc, kind):
            return said
    if not isinstance(exc, OSError):
        return "not an HTTP response"
    if exc.errno is None or exc.errno not in errno.errorcode:
        return "cannot connect"
    return os.strerror(exc.errno).lower()
