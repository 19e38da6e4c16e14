"""What the data path tells whoever counts: one call when a request is over, and a few on the way."""

from __future__ import annotations

from typing import Protocol

import msgspec

from proxy.lease import Served, Usage
from proxy.routing.router import Decision


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over. Seconds count from the moment that its body had been read.

    `status` is what the client saw, None if it saw none. `cut` means that it saw no proper end. `replica` and
    `decision` belong to the last attempt, `response_id` is the `id` in the answer's body. `first_byte_secs` is None
    when no replica answered. `n`, `max_tokens` and `stream` are what the client asked for. `replicas` are those of the
    parts, if a batch was divided: `replica` is the first of them then, the counts in `decision` and `usage` are sums.
    """

    path: str
    status: int | None
    replica: int | None
    decision: Decision | None
    served: Served | None
    usage: Usage | None
    response_id: str | None
    request_bytes: int
    response_bytes: int
    waited_secs: float
    first_byte_secs: float | None
    total_secs: float
    attempts: int
    left: bool
    cut: bool
    n: int = 1
    max_tokens: int | None = None
    stream: bool = False
    replicas: tuple[int, ...] = ()


class Observer(Protocol):
    """Called from the event loop; must be quick and must not raise.

    `retried`: an attempt on `replica` failed for `reason` and another follows. `client_left`: in the phase "body",
    "waiting", "asked" (no answer yet) or "streaming". `waiting`: so many requests are held back at the gate now.
    """

    def finished(self, outcome: Outcome) -> None: ...

    def retried(self, replica: int, reason: str) -> None: ...

    def client_left(self, phase: str) -> None: ...

    def waiting(self, count: int) -> None: ...


class Silent:
    """An observer that counts nothing."""

    def finished(self, outcome: Outcome) -> None:
        pass

    def retried(self, replica: int, reason: str) -> None:
        pass

    def client_left(self, phase: str) -> None:
        pass

    def waiting(self, count: int) -> None:
        pass


class Tee:
    """Tells two observers, one after the other."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._both = (first, second)

    def finished(self, outcome: Outcome) -> None:
        for each in self._both:
            each.finished(outcome)

    def retried(self, replica: int, reason: str) -> None:
        for each in self._both:
            each.retried(replica, reason)

    def client_left(self, phase: str) -> None:
        for each in self._both:
            each.client_left(phase)

    def waiting(self, count: int) -> None:
        for each in self._both:
            each.waiting(count)
