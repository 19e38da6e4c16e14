"""A file system in memory: adapter directories by path, and when each replica comes to see what was written.

The weights at a path are a word ("w3"). Two words are special: weights that begin with `PARTIAL` are a directory that
is still being copied, `BROKEN` ones no engine takes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from proxy.control.adapter_files import Fingerprint, Seen

PARTIAL = "partial"
BROKEN = "broken"


def digest_of(weights: str) -> str:
    return f"sha256:{hashlib.sha256(weights.encode()).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Entry:
    weights: str
    since: float
    stamp: int


class FakeFiles:
    """`lag` is how many seconds later the proxy sees what was written; None: it never does (no mount). `epoch` is wall
    time where `clock` is 0.

    A directory that was replaced is seen as missing until the new one is seen: a mount that goes on showing the old
    content could not be told from the right one by anybody but the engine.
    """

    def __init__(self, clock: Callable[[], float], lag: float | None = 0.0, epoch: float = 0.0) -> None:
        self.lag = lag
        self._epoch = epoch
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._stamps = 0
        self.history: dict[str, list[tuple[float, str | None]]] = {}

    def write(self, path: str, weights: str) -> None:
        """The directory appears whole, replacing what was there."""
        self._stamps += 1
        self._entries[path] = Entry(weights, self._clock(), self._stamps)
        self.history.setdefault(path, []).append((self._clock(), weights))

    def delete(self, path: str) -> None:
        if self._entries.pop(path, None) is not None:
            self.history[path].append((self._clock(), None))

    def read(self, path: str, lag: float = 0.0) -> str | None:
        """What somebody whose view lags sees at this moment; None: nothing."""
        entry = self._entries.get(path.rstrip("/"))
        return entry.weights if entry is not None and entry.since + lag <= self._clock() else None

    def contents(self, path: str, since: float) -> set[str]:
        """All weights that lay at the path at some moment from `since` until now."""
        found: set[str] = set()
        for when, weights in self.history.get(path, []):
            if when <= since:
                found.clear()
            if weights is not None:
                found.add(weights)
        return found

    # -- proxy.control.plane.FilesLike ---------------------------------------------------------------------------------

    def look(self, path: str) -> Seen | None:
        weights = self._seen(path)
        mark = self.fingerprint(path)
        return Seen(digest_of(weights), mark) if weights is not None and mark is not None else None

    def fingerprint(self, path: str) -> Fingerprint | None:
        if self._seen(path) is None:
            return None
        entry = self._entries[path.rstrip("/")]
        return (("adapter_config.json", 1, int((entry.since + self._epoch) * 1e9), entry.stamp),)

    def _seen(self, path: str) -> str | None:
        weights = self.read(path, self.lag) if self.lag is not None else None
        return None if weights is None or weights.startswith(PARTIAL) else weights
