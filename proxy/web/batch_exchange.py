"""A completion with several prompts: divided among the replicas that hold their beginnings, and answered as by one.

The division is part of the one step in which a request gets its meaning: the name is resolved once, for all parts, and
a lease is taken for each. Then every part runs in a task of its own (`proxy.web.batch_part`), and this request's task
waits for the first failure or for all. It ends no earlier than they do: whatever happens, the parts are cancelled,
awaited, and their leases given back. The first failure is the answer to the whole. After the head of a stream, a part
that breaks off in the middle cuts the stream; any other failure is its last event, as in vLLM.

A batch that is not divided (see `proxy.web.batch`; or one replica is best for all its prompts) goes as it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from proxy.errors import LorafleetError, Unavailable, Unmergeable
from proxy.upstream.transport import Headers
from proxy.web.asgi import Message, Receive, Scope, Send
from proxy.web.batch import Batch, read
from proxy.web.batch_merge import merge
from proxy.web.batch_part import Failed, Part, Rebound, Refusal, Refused, Share
from proxy.web.batch_stream import DONE, usage_event
from proxy.web.batch_sums import total, whole, without_cached
from proxy.web.batch_weave import Weave
from proxy.web.exchange import Exchange
from proxy.web.judge import Again, Cut, Held
from proxy.web.observe import Outcome
from proxy.web.relay import Relay
from proxy.web.usage import Learned

if TYPE_CHECKING:
    from proxy.routing.request import RouteRequest
    from proxy.web.forward import Forwarder


LARGE = 256 << 10
"""Bytes of a body from which on others are served between the steps of reading it."""


class WholeRelay(Relay):
    """Relays the answer to a batch that was not divided."""

    __slots__ = ("_prompts",)

    def __init__(self, send: Send, prompts: int) -> None:
        super().__init__(send)
        self._prompts = prompts

    async def run(self, *args: Any, **more: Any) -> None:
        await super().run(*args, **more)
        self.learned = without_cached(self.learned, self._prompts)


class BatchExchange(Exchange):
    """The life of one request with a list of prompts; `run` once."""

    __slots__ = ("_batch", "_has_read", "_parts", "_shares")

    def __init__(
        self, forwarder: Forwarder, scope: Scope, send: Send, body: bytes, request: RouteRequest, *, routed: bool
    ) -> None:
        super().__init__(forwarder, scope, send, body, request, routed=routed)
        self._relay = WholeRelay(send, len(request.prompts))
        self._batch: Batch | None = None
        self._has_read = False
        self._shares: list[Share] = []
        self._parts: list[Part] = []

    async def run(self, receive: Receive) -> None:
        if len(self._body) >= LARGE:  # each step takes some milliseconds a megabyte, in which nobody else is served
            await asyncio.sleep(0)
            self._read()
            await asyncio.sleep(0)
        await super().run(receive)

    # -- dividing ------------------------------------------------------------------------------------------------------

    def _read(self) -> Batch | None:
        if not self._has_read:
            self._has_read = True
            self._batch = read(self._body)
        return self._batch

    def _take(self) -> Held:
        forwarder, request = self._forwarder, self._request
        fleet = forwarder.fleet
        served = fleet.resolve(self._model)
        candidates = fleet.routable(self._tried)
        upstream = served.upstream if served is not None else ""
        alike = len(candidates) > 1 and len({prompt.kind for prompt in request.prompts}) == 1
        division = fleet.router.split(request, upstream, candidates, fleet.clock()) if alike else []
        batch = self._read() if len(division) > 1 else None
        if batch is None or len(batch.prompts) != len(request.prompts):
            self._shares = []
            return forwarder.take(request, served, self._tried, routed=True)
        shares: list[Share] = []
        try:
            for replica, positions in sorted(division, key=lambda part: part[1][0]):
                prompts = tuple([request.prompts[position] for position in positions])
                part = structs.replace(request, prompts=prompts)
                others = self._tried.union(candidates) - {replica}
                lease = forwarder.take(part, served, others, routed=True)
                shares.append(Share(tuple(positions), part, lease))
        except BaseException:
            _give_back(shares)
            raise
        self._shares = shares
        return shares[0].lease

    # -- asking --------------------------------------------------------------------------------------------------------

    async def _attempt(self, held: Held) -> None:
        shares = self._shares
        if not shares:
            await super()._attempt(held)
            return
        self._phase = "asked"
        self._parts = []
        weave = Weave(self._send, len(shares), self._head)
        tasks: list[asyncio.Task[None]] = []
        try:
            for number, share in enumerate(shares):
                tasks.append(asyncio.create_task(self._serve(number, share, weave)))
            failure = await weave.run()
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                _give_back(shares)
                self._relay.sent = weave.sent
        self._parts = self._in_order()
        if failure is not None:
            await self._fail(failure, weave)
        elif any(part.relay.events is not None for part in self._parts):
            await self._end_stream(weave)
        else:
            await self._answer()

    async def _serve(self, number: int, share: Share, weave: Weave) -> None:
        """Serve one part. Raises nothing: an exception that a task keeps leads back to the part, which knows its task,
        and only the collector could free the circle."""
        assert self._batch is not None
        failure: Exception | None = None
        try:
            part = Part(self._forwarder, self._scope, number, share, self._batch, weave, self._tried)
            self._parts.append(part)
            await part.serve()
        except (LorafleetError, Cut, Refused, Failed) as exc:
            failure = exc.with_traceback(None)
        except Exception as exc:
            failure = exc
        except asyncio.CancelledError:
            failure = Unavailable("the proxy is shutting down")
        weave.ended(failure)

    # -- answering -----------------------------------------------------------------------------------------------------

    async def _answer(self) -> None:
        answers = [part.relay.answer for part in self._parts]
        body = merge([answer for answer in answers if answer is not None])
        learned = [part.relay.learned for part in self._parts]
        self._relay.learned = Learned(total([each.usage for each in learned]), learned[0].response_id)
        head = self._head()
        head["headers"].append((b"content-length", b"%d" % len(body)))
        await self._send(head)
        await self._last(body)

    async def _end_stream(self, weave: Weave) -> None:
        events = [part.relay.events for part in self._parts]
        streams = [each for each in events if each is not None]
        if len(streams) < len(events):
            await self._fail(Unmergeable("some parts of the batch were answered as streams, others not"), weave)
            return
        self._learn_from_streams(weave)
        if not weave.began:
            await self._send(self._head())
        await self._last(usage_event(streams) + DONE)

    async def _fail(self, failure: Exception, weave: Weave) -> None:
        """The client hears of the failure. Raises it if `Exchange.run` is to tell, or Again."""
        if weave.began:
            self._learn_from_streams(weave)
        if isinstance(failure, Rebound) and not weave.began:
            raise Again("the weights changed", failure, repeat=False, skip=False)
        if isinstance(failure, Failed):
            if not weave.began:
                await self._send(self._head())
            await self._last(b"%b\n\n%b" % (failure.event, DONE))
        elif isinstance(failure, Refused):
            said = failure.answer
            if weave.began:
                await self._last(_event(_error_in(said)) + DONE)
                return
            self._relay.status = said.status
            headers = [*said.headers, (b"content-length", b"%d" % len(said.body))]
            await self._send({"type": "http.response.start", "status": said.status, "headers": headers})
            await self._last(said.body)
        elif isinstance(failure, LorafleetError) and weave.began:
            await self._last(_event(failure.json()) + DONE)
        else:
            raise failure

    def _head(self) -> Message:
        """The head of a good answer; with it, there is no way back."""
        self._answered = self._first_answer()
        self._phase = "streaming"
        self._relay.status = 200
        parts = self._in_order()
        known = next((part.relay.headers for part in parts if part.relay.headers), ())
        return {"type": "http.response.start", "status": 200, "headers": [*known, *self._stamps(parts)]}

    async def _last(self, body: bytes) -> None:
        self._relay.complete = True
        self._relay.sent += len(body)
        await self._send({"type": "http.response.body", "body": body})

    def _stamps(self, parts: Sequence[Part]) -> Headers:
        """Who answered and why, one after the other; the tokens that should be cached, together."""
        stamps = [self._forwarder.stamps(part.held) for part in parts]
        joined: list[tuple[bytes, bytes]] = []
        for name, value in stamps[0]:
            values = [dict(each).get(name, b"") for each in stamps]
            if name in (b"x-lorafleet-replica", b"x-lorafleet-route"):
                value = b",".join(values)
            elif name == b"x-lorafleet-predicted-cached-tokens":
                value = b"%d" % sum(map(int, values))
            joined.append((name, value))
        return joined

    def _in_order(self) -> list[Part]:
        """The parts that have begun, by their first prompts."""
        return sorted(self._parts, key=lambda part: part.share.positions)

    def _first_answer(self) -> float | None:
        """When the first part's answer began, on the loop's clock."""
        return min([part.answered for part in self._parts if part.answered is not None], default=None)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _learn_from_streams(self, weave: Weave) -> None:
        usages = [part.relay.learned.usage for part in self._parts]
        self._relay.learned = Learned(total(usages), weave.common.response_id)

    def _outcome(self, cut: bool) -> Outcome:
        outcome = super()._outcome(cut)
        parts = self._in_order()
        if not self._shares or not parts:
            return outcome
        answered = self._first_answer()
        return structs.replace(
            outcome,
            replica=parts[0].held.replica.index,
            replicas=tuple([part.held.replica.index for part in parts]),
            decision=whole([(part.share.positions, part.held.decision) for part in parts]),
            attempts=outcome.attempts + sum([max(0, part.attempts - 1) for part in parts]),
            waited_secs=outcome.waited_secs + max([part.waited_secs for part in parts]),
            first_byte_secs=answered - self._began if answered is not None else None,
        )


def _give_back(shares: Sequence[Share]) -> None:
    for share in shares:
        share.lease.release(ok=False)


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _error_in(refused: Refusal) -> bytes:
    """The error that a replica answered with, on one line."""
    try:
        said = msgspec.json.decode(refused.body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        said = None
    if isinstance(said, dict) and "error" in said:
        return msgspec.json.encode(said)
    return Unmergeable(f"a replica answered a part of the batch with status {refused.status}").json()
