"""Where a replica's Bearer token comes from. Nothing here prints it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from proxy.errors import ConfigError

logger = logging.getLogger(__name__)

_RECHECK_SECS = 0.5
_LARGEST = 64 * 1024  # bytes; a token file that is larger is some other file
_TOKEN = re.compile(r"[!-~]+")  # visible ASCII: no space, no line break, nothing that could end a header line

Stamp = tuple[int, int, int]
"""mtime in ns, size in bytes, inode: together they change whenever a token file is written or replaced."""


def check_token(text: str, where: str) -> str:
    """`text` without surrounding white space. Raises ConfigError, which names `where` and never the token."""
    token = text.strip()
    if not token:
        raise ConfigError(f"{where} is empty: put the token in it, or leave the setting out")
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{where} holds a space, a line break or a character outside ASCII: no token has those")
    return token


class TokenSource:
    """Callable that gives the token to send now, or None. Cheap enough to be asked on every request.

    Made by `none`, `from_environment` or `from_file`.
    """

    __slots__ = ("_clock", "_path", "_recheck_at", "_stamp", "_token", "_warned")

    def __init__(self, token: str | None, path: Path | None = None, clock: Callable[[], float] = time.monotonic):
        self._token = token
        self._path = path
        self._clock = clock
        self._stamp: Stamp | None = None
        self._recheck_at = 0.0
        self._warned = False

    @classmethod
    def none(cls) -> TokenSource:
        return cls(None)

    @classmethod
    def from_environment(cls, variable: str, environment: Mapping[str, str] = os.environ) -> TokenSource:
        """The value that `variable` has now. Raises ConfigError when it is unset, empty or not a token."""
        if variable not in environment:
            raise ConfigError(f"environment variable {variable} is not set: set it, or name another one")
        return cls(check_token(environment[variable], f"environment variable {variable}"))

    @classmethod
    def from_file(cls, path: str | Path, clock: Callable[[], float] = time.monotonic) -> TokenSource:
        """The content of `path`, read again within half a second of a change.

        Raises ConfigError when it cannot be read now; later, the last good token stays in use.
        """
        source = cls(None, Path(path), clock)
        try:
            source._load()
        except OSError as exc:
            raise ConfigError(f"token file {path} cannot be read: {exc.strerror}") from None
        return source

    def __call__(self) -> str | None:
        if self._path is not None and self._clock() >= self._recheck_at:
            self._refresh()
        return self._token

    def __repr__(self) -> str:
        kind = "file" if self._path is not None else "fixed" if self._token is not None else "none"
        return f"TokenSource({kind})"

    def __reduce__(self) -> str:
        raise TypeError("a token source is not pickled: the token would be in the bytes")

    def _refresh(self) -> None:
        try:
            if _stamp(os.stat(self._path or "")) != self._stamp:
                self._load()
            else:
                self._recheck_at = self._clock() + _RECHECK_SECS
            self._warned = False
        except (OSError, ConfigError) as exc:
            self._recheck_at = self._clock() + _RECHECK_SECS
            if not self._warned:
                self._warned = True
                why = exc.strerror if isinstance(exc, OSError) else exc.message
                logger.warning("token file %s: %s; the last good token stays in use", self._path, why)

    def _load(self) -> None:
        assert self._path is not None
        self._recheck_at = self._clock() + _RECHECK_SECS
        with open(self._path, "rb") as file:
            stamp = _stamp(os.fstat(file.fileno()))  # of what is read, not of what may have replaced it
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigError(f"token file {self._path} is larger than {_LARGEST} bytes: is it the right file?")
        self._token = check_token(content.decode("latin-1"), f"token file {self._path}")
        self._stamp = stamp


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino
