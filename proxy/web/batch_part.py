"""One part of a divided batch: a request like any other, but its answer goes to whoever puts the parts together.

Gate, lease, retry and the death of a replica are an `Exchange`'s. A part differs in what follows an answer: nothing of
it may reach the client before all parts have been accepted, and an answer that is one JSON document reaches it only
when all are whole; so a part whose JSON breaks off in the middle can still be asked for elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from proxy.errors import NotFound, Unavailable, Unmergeable
from proxy.lease import Served
from proxy.routing.request import RouteRequest
from proxy.upstream.transport import Headers, UpstreamResponse
from proxy.web import usage
from proxy.web.asgi import Message, Scope
from proxy.web.batch import Batch, Places
from proxy.web.batch_merge import PartAnswer
from proxy.web.batch_stream import PartEvents
from proxy.web.batch_sums import without_cached
from proxy.web.batch_weave import Weave
from proxy.web.exchange import Exchange
from proxy.web.judge import Held
from proxy.web.relay import Relay, opening
from proxy.web.rewrite import GiveBack

if TYPE_CHECKING:
    from proxy.web.forward import Forwarder

LONGEST_ANSWER: Final = 256 << 20
"""Bytes of a part's JSON answer; it is held until all parts have theirs."""

_OWN: Final = frozenset({b"content-length", b"content-encoding"})


@dataclass(frozen=True, slots=True)
class Share:
    """What a part is made of: its prompts' positions, what routing knows of them, and the lease that was taken."""

    positions: tuple[int, ...]
    request: RouteRequest
    lease: Held


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error that a replica answered, as it goes to the client but for its length."""

    status: int
    headers: Headers
    body: bytes


class Refused(Exception):
    """A replica answered a part with an error. It is the answer to the whole."""

    def __init__(self, answer: Refusal) -> None:
        super().__init__(answer.status)
        self.answer = answer


class Failed(Exception):
    """An error came as an event of a part's stream. `event` is without the empty line that ends it."""

    def __init__(self, event: bytes) -> None:
        super().__init__()
        self.event = event


class Rebound(Unavailable):
    """A part cannot be asked for again with the weights of the others: they are gone. The whole can."""


class PartRelay(Relay):
    """Takes a part's answer: `answer` (JSON) or `events` (written to the weave already) or `refused`.

    `status` stays None as long as the client has nothing of this part.
    """

    __slots__ = ("_number", "_places", "_weave", "answer", "events", "headers", "refused")

    def __init__(self, number: int, places: Places, weave: Weave) -> None:
        super().__init__(_nowhere)
        self._number = number
        self._places = places
        self._weave = weave
        self.headers: Headers = ()
        self.answer: PartAnswer | None = None
        self.events: PartEvents | None = None
        self.refused: Refusal | None = None

    async def run(
        self,
        response: UpstreamResponse,
        body: bytes | None,
        served: Served | None,
        stamps: Headers,
        *,
        learn: bool,
        began: Callable[[], None],
        completed: Callable[[], None],
    ) -> None:
        """See `Relay.run`. Raises Failed and Unmergeable besides."""
        status = response.status
        headers, media, coded, back = opening(response, served)
        if status == 200:
            self._weave.settled(self._number)
        if status != 200:
            said = await self._whole(response, body, back)
            lines = [*(line for line in headers if line[0] != b"content-length"), *stamps]
            self.refused = Refusal(status, lines, said)
            began()
        elif coded:
            raise Unmergeable("a replica's answer to a part of the batch is compressed")
        elif media.startswith(b"text/event-stream"):
            self._keep(headers)
            await self._weave_in(response, back, began)
        elif media.startswith(b"application/json"):
            said = await self._whole(response, body, back)
            began()
            self._keep(headers)
            self.answer = PartAnswer(said, self._places)
            self.learned = usage.read(media, [said])
        else:
            raise Unmergeable("a replica's answer to a part of the batch is neither JSON nor a stream")
        self.complete = True
        completed()
        self.learned = without_cached(self.learned, len(self._places.positions))

    def _keep(self, headers: Headers) -> None:
        self.headers = [line for line in headers if line[0] not in _OWN]

    async def _whole(self, response: UpstreamResponse, body: bytes | None, back: GiveBack | None) -> bytes:
        if body is None:
            body = response.whole()
        if body is None:
            chunks, size = [], 0
            async for chunk in response.chunks():
                chunks.append(chunk)
                size += len(chunk)
                if size > LONGEST_ANSWER:
                    raise Unmergeable("a replica's answer to a part of the batch is too long to be put together")
            body = b"".join(chunks)
        return body if back is None else back.feed(body) + back.rest()

    async def _weave_in(self, response: UpstreamResponse, back: GiveBack | None, began: Callable[[], None]) -> None:
        weave = self._weave
        self.events = events = PartEvents(self._places, weave.common)
        await weave.opened()
        first = True
        async for chunk in response.chunks():
            if first:
                began()
                first = False
            data = events.feed(back.feed(chunk) if back is not None else chunk)
            if data:
                self.status = 200
                await weave.write(data)
            if events.error is not None:
                self.status = 200
                raise Failed(events.error)
        events.end()
        if events.usage is not None:
            self.learned = usage.of_stream(b'data: {"usage":%b}\n\n' % bytes(events.usage))


class Part(Exchange):
    """`serve` once, in a task of its own: made there, too."""

    __slots__ = ("_first", "_number", "_weave", "share")

    _relay: PartRelay

    def __init__(
        self,
        forwarder: Forwarder,
        scope: Scope,
        number: int,
        share: Share,
        batch: Batch,
        weave: Weave,
        tried: frozenset[int],
    ) -> None:
        body = batch.body(share.positions)
        super().__init__(forwarder, scope, _nowhere, body, share.request, routed=True)
        self._number = number
        self._weave = weave
        self._relay = PartRelay(number, Places(share.positions, batch.n), weave)
        self._first: Held | None = share.lease
        self._tried = tried
        self.share = share

    async def serve(self) -> None:
        """Ends when the answer is complete. Raises Refused, Failed, Cut or a LorafleetError (Rebound is one)."""
        while not await self._try_once():
            self._weave.settled(self._number)
        if self._relay.refused is not None:
            raise Refused(self._relay.refused)

    async def _hold(self) -> Held:
        first, self._first = self._first, None
        if first is not None:
            if first.replica.index in self._forwarder.fleet.routable():
                self._held = first
                return first
            first.release(ok=False)  # it died before this task began
            self._weave.settled(self._number)
        return await super()._hold()

    def _take(self) -> Held:
        """Another replica, with the weights that the other parts are answered with.

        Raises Rebound when their name means something else by now, or nothing.
        """
        forwarder, bound = self._forwarder, self.share.lease.served
        if bound is not None:
            try:
                now = forwarder.fleet.resolve(bound.name)
            except NotFound:
                now = None
            if now is None or now.upstream != bound.upstream:
                raise Rebound(f"the weights of {bound.name} changed while a part of the batch was asked for again")
        return forwarder.take(self._request, bound, self._tried, routed=True)

    def _outgoing(self, served: Served | None) -> tuple[Headers, bytes]:
        headers, body = super()._outgoing(served)
        return [line for line in headers if line[0] != b"accept-encoding"], body  # the answer has to be readable

    # -- afterwards ----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Held:
        """Of the last attempt."""
        return self._held if self._held is not None else self.share.lease

    @property
    def relay(self) -> PartRelay:
        return self._relay

    @property
    def attempts(self) -> int:
        return self._attempts

    @property
    def waited_secs(self) -> float:
        return self._waited

    @property
    def answered(self) -> float | None:
        """When its answer began, on the loop's clock."""
        return self._answered


async def _nowhere(message: Message) -> None:
    pass
