"""The data path: requests that one replica answers. Pure ASGI, no Starlette object between client and replica.

`Forwarder` holds what requests share; the life of one is in `proxy.web.exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.fleet import Fleet
from proxy.lease import Served
from proxy.routing.request import RouteRequest, parse
from proxy.upstream.transport import Transport
from proxy.web.asgi import Receive, Scope, Send
from proxy.web.batch_exchange import BatchExchange
from proxy.web.body import read_body
from proxy.web.exchange import Exchange
from proxy.web.gate import Gate
from proxy.web.judge import Held
from proxy.web.observe import Observer, Silent
from proxy.web.passthrough import Errands

SERVER_ERRORS = 3
"""So many 5xx answers of one replica in a row count as a broken call."""

_UNROUTED = RouteRequest()


@dataclass(frozen=True, slots=True)
class ForwardSettings:
    """Limits of the data path. A request that finds no replica waits `wait_ready_secs`; at most `pause_queue` requests
    wait at a time, also while the fleet is paused."""

    max_body_bytes: int = 256 << 20
    wait_ready_secs: float = 30.0
    pause_queue: int = 4096


class Forwarder:
    """ASGI callables for the data path."""

    def __init__(
        self,
        fleet: Fleet,
        transport: Transport,
        settings: ForwardSettings | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.fleet = fleet
        self.transport = transport
        self.settings = settings if settings is not None else ForwardSettings()
        self.observer: Observer = observe if observe is not None else Silent()
        self.gate = Gate(fleet, self.settings.pause_queue, self.observer.waiting)
        self.errands = Errands(fleet)
        self._server_errors: dict[int, int] = {}

    # -- ASGI ----------------------------------------------------------------------------------------------------------

    async def completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that generates: routed by its prompt, held back while the fleet is paused."""
        body = await read_body(scope, receive, send, self.settings.max_body_bytes, self.observer.client_left)
        if body is not None:
            request = parse(scope["path"], body)
            life = Exchange if len(request.prompts) < 2 else BatchExchange
            await life(self, scope, send, body, request, routed=True).run(receive)

    async def to_any(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that any ready replica can answer; a model's name in it is resolved as in a completion."""
        body = await read_body(scope, receive, send, self.settings.max_body_bytes, self.observer.client_left)
        if body is not None:
            await Exchange(self, scope, send, body, _UNROUTED, routed=False).run(receive)

    # -- what an exchange asks for -------------------------------------------------------------------------------------

    def take(self, request: RouteRequest, served: Served | None, exclude: frozenset[int], *, routed: bool) -> Held:
        """Hold a replica. Raises Unavailable when none may be asked."""
        return self.fleet.lease(request, served, exclude) if routed else self.errands.take(served, exclude)

    def stamps(self, held: Held) -> list[tuple[bytes, bytes]]:
        """The header lines that say who answered, why, and with which weights."""
        lines = [(b"x-lorafleet-replica", b"%d" % held.replica.index)]
        decision, served = held.decision, held.served
        if decision is not None:
            lines.append((b"x-lorafleet-route", decision.route.encode()))
            lines.append((b"x-lorafleet-predicted-cached-tokens", b"%d" % decision.cached_tokens))
        if served is not None and served.adapter:
            lines.append((b"x-lorafleet-adapter", served.name.encode()))
            if served.digest is not None:
                lines.append((b"x-lorafleet-digest", served.digest.encode()))
        return lines

    def answered(self, index: int, status: int) -> None:
        """A replica's whole answer is with the client. 4xx are the client's own; a row of 5xx is a broken call."""
        if status < 500:
            if self._server_errors:
                self._server_errors.pop(index, None)
            return
        row = self._server_errors.get(index, 0) + 1
        self._server_errors[index] = row
        if row >= SERVER_ERRORS:
            self.failed(index, f"{row} answers in a row were server errors, the last one {status}")

    def failed(self, index: int, reason: str) -> None:
        """A call to a replica broke."""
        self._server_errors.pop(index, None)
        self.fleet.call_failed(index, reason)

    def lost_adapter(self, index: int, served: Served) -> bool:
        """A replica does not know a name. False if it need not: the name means something else by now, or nothing."""
        bound = self.fleet.desired.adapters.get(served.name)
        if bound is None or bound.upstream != served.upstream:
            return False
        self.fleet.lost_adapter(index, served.upstream)
        return True
