"""Which answers and failures of a replica are the client's to hear, and which are a reason to ask another replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from proxy.errors import LorafleetError, Phase, Unavailable, UpstreamError
from proxy.lease import Served, Usage
from proxy.upstream.transport import UpstreamResponse
from proxy.web.relay import content_type

if TYPE_CHECKING:
    from proxy.fleet import Replica
    from proxy.routing.router import Decision
    from proxy.web.forward import Forwarder

GATEWAY = frozenset({502, 503, 504})

SMALL_ERROR = 64 << 10
"""Bytes of a 404 that are read to see whether it is about the model's name."""


class Held(Protocol):
    """A replica that works for a request: a `Lease`, or the looser hold of a request that no routing is for."""

    @property
    def replica(self) -> Replica: ...

    @property
    def served(self) -> Served | None: ...

    @property
    def decision(self) -> Decision | None: ...

    on_lost: Callable[[], None] | None

    def first_byte(self) -> None: ...

    def release(self, *, ok: bool, usage: Usage | None = None) -> None: ...


class Again(Exception):
    """An attempt came to nothing and another one may be made.

    `error` is what the client hears if none is. `repeat`: the replica may have worked on the request, and that happens
    twice at most. `skip`: this replica is not to be asked next.
    """

    def __init__(self, reason: str, error: LorafleetError, *, repeat: bool, skip: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.repeat = repeat
        self.skip = skip


class Cut(Exception):
    """The answer broke off after its head had gone out."""


def broken(error: UpstreamError) -> Again:
    """The call broke before a byte of the answer went out."""
    return Again(error.message, error, repeat=error.phase is not Phase.NOT_SENT)


def declared_dead() -> Again:
    """The replica died while it was waited for, and only the health check noticed."""
    error = UpstreamError("the replica died while it worked on this", Phase.MAYBE_SENT)
    return Again("declared dead", error, repeat=True)


async def judge(
    forwarder: Forwarder, response: UpstreamResponse, held: Held, *, repeated: bool, tried: frozenset[int]
) -> bytes | None:
    """Look at an error answer before it goes to the client: its body, if that had to be read.

    Raises Again if another replica should be asked instead, UpstreamError if the body breaks off.
    """
    served, index, status = held.served, held.replica.index, response.status
    if status == 404 and served is not None and served.adapter:
        length = response.content_length
        body = await response.read() if length is not None and length <= SMALL_ERROR else None
        if body is not None and b"does not exist" in body and forwarder.lost_adapter(index, served):
            gone = Unavailable(f"no replica holds {served.name} at the moment")
            raise Again("lost its adapters", gone, repeat=False, skip=False)
        return body
    if status in GATEWAY and not repeated and _from_gateway(response) and forwarder.fleet.routable(tried | {index}):
        held.on_lost = None
        said = UpstreamError(f"a gateway before the replica answered {status}", Phase.MAYBE_SENT)
        forwarder.failed(index, said.message)
        raise broken(said)
    return None


def _from_gateway(response: UpstreamResponse) -> bool:
    """Whether something in front of a dying replica spoke: what vLLM says itself is JSON."""
    return not content_type(response.headers)[0].startswith(b"application/json")
