"""One request from its body to the last byte of its answer: gate, name, lease, replica, client, and all that can break.

Theory. The whole life runs in the task that the server made, awaiting one thing at a time: the gate, the replica's
head, its next chunk, room in the client's socket. Two things may happen meanwhile: the client leaves, or the replica is
declared dead (`Lease.on_lost`). Both set a flag and cancel the task, as `asyncio.timeout` does, so whatever is awaited
ends at once, and the transport closes the connection to the replica on its way out. No second task, no polling.

What follows a failure before any byte of ours went out (the client knows nothing yet):

- The request was not sent: another replica, as many as there are.
- It may have been sent, or the replica was declared dead: once more on another replica. A completion changes nothing in
  an engine, so it may be asked twice; one that kills engines must not get to kill them all.
- 502, 503 or 504 that is not JSON: a gateway before the replica speaks, vLLM's own errors are JSON. As before.
- 404 for a committed adapter: the replica restarted and lost it. The fleet is told, the next replica is asked.
- Nobody else to ask: wait at the gate, and after a moment the same replica again, until `wait_ready_secs` are used up.

Any other answer is the client's, unchanged. Its head goes out with the first byte of its body. After that there is no
second try: the client's connection is cut (the server closes a connection whose response was not ended), so that half
an answer never looks like a whole one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

from proxy.errors import LorafleetError, Unavailable, UpstreamError
from proxy.lease import Served
from proxy.routing.request import RouteRequest
from proxy.upstream.transport import Headers, UpstreamResponse
from proxy.web.asgi import Receive, Scope, Send, send_error, watch
from proxy.web.interrupt import Interrupt
from proxy.web.judge import Again, Cut, Held, broken, declared_dead, judge
from proxy.web.observe import Outcome
from proxy.web.relay import Relay
from proxy.web.rewrite import model_in, with_model

if TYPE_CHECKING:
    from proxy.web.forward import Forwarder

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)
NOBODY: frozenset[int] = frozenset()
BACKOFF_SECS = 0.1
"""How long a replica that just failed is left alone when there is no other; doubled each time."""


class Exchange:
    """The life of one request; `run` once."""

    __slots__ = (
        "_answered",
        "_attempts",
        "_backoff",
        "_began",
        "_body",
        "_failure",
        "_forgive_at",
        "_forwarder",
        "_held",
        "_interrupt",
        "_loop",
        "_model",
        "_over",
        "_patience",
        "_phase",
        "_relay",
        "_repeats",
        "_request",
        "_routed",
        "_scope",
        "_send",
        "_target",
        "_tried",
        "_waited",
    )

    def __init__(
        self, forwarder: Forwarder, scope: Scope, send: Send, body: bytes, request: RouteRequest, *, routed: bool
    ) -> None:
        path, query = scope["raw_path"], scope["query_string"]
        self._forwarder = forwarder
        self._scope = scope
        self._send = send
        self._body = body
        self._request = request
        self._routed = routed
        self._target: str = (path + b"?" + query if query else path).decode("latin-1")
        self._model = request.model or (model_in(body) if body else None)
        self._interrupt = Interrupt()
        self._loop = asyncio.get_running_loop()
        self._relay = Relay(send)
        self._phase = "waiting"
        self._held: Held | None = None
        self._failure: LorafleetError | None = None
        self._tried = NOBODY
        self._attempts = 0
        self._repeats = 0
        self._patience = forwarder.settings.wait_ready_secs
        self._backoff = BACKOFF_SECS
        self._forgive_at = 0.0
        self._over = False
        self._began = self._loop.time()
        self._waited = 0.0
        self._answered: float | None = None

    # -- the frame -----------------------------------------------------------------------------------------------------

    async def run(self, receive: Receive) -> None:
        """Serve the request to its end, whatever that is. Raises nothing that is the client's or the fleet's fault."""
        departure = watch(self._scope, receive, self._on_left)
        error: LorafleetError | None = None
        cut = False
        try:
            while not await self._try_once():
                pass
        except Cut as why:
            cut = True
            logger.warning("an answer was cut short: %s", why)
        except LorafleetError as exc:
            error = _bare(exc)
        except asyncio.CancelledError:
            if not self._interrupt.caught():
                error = Unavailable("the proxy is shutting down")
                cut = self._relay.status is not None
        finally:
            self._over = True
            departure.stop()
        if self._interrupt.left:
            self._forwarder.observer.client_left(self._phase)
        elif error is not None and self._relay.status is None:
            self._relay.status = error.status
            await send_error(self._send, error)
        self._forwarder.observer.finished(self._outcome(cut))

    def _on_left(self) -> None:
        if not self._over and not self._relay.complete:
            self._interrupt.left = True
            self._interrupt.fire()

    def _on_began(self) -> None:
        assert self._held is not None
        self._held.first_byte()
        self._answered = self._loop.time()
        self._phase = "streaming"

    def _on_completed(self) -> None:
        assert self._held is not None
        self._held.on_lost = None

    # -- before the replica --------------------------------------------------------------------------------------------

    async def _hold(self) -> Held:
        """Wait for the turn, then give the name its meaning and take a replica, in one step.

        Raises NotFound, Unavailable, or the failure of the last attempt when patience ends.
        """
        fleet = self._forwarder.fleet
        waited = False
        while True:
            if self._routed and fleet.paused():
                self._check_name()
                await self._wait(None, waited)
            elif fleet.routable(self._tried):
                self._held = held = self._take()
                return held
            else:
                self._check_name()
                await self._wait_ready(waited)
            waited = True

    def _take(self) -> Held:
        served = self._forwarder.fleet.resolve(self._model)
        return self._forwarder.take(self._request, served, self._tried, routed=self._routed)

    def _check_name(self) -> None:
        """A name that means nothing is not worth the wait, if that can be known."""
        if self._forwarder.fleet.base_models():
            self._forwarder.fleet.resolve(self._model)

    async def _wait_ready(self, waited: bool) -> None:
        """Wait for a replica that has not failed; for any, after a moment."""
        if self._patience <= 0:
            raise self._failure or Unavailable("no replica can serve this now")
        before = self._loop.time()
        secs = self._patience
        if self._tried:
            self._forgive_at = self._forgive_at or before + self._backoff
            secs = min(secs, self._forgive_at - before)
        await self._wait(max(secs, 0.0), waited)
        now = self._loop.time()
        self._patience -= now - before
        if self._tried and now >= self._forgive_at:
            self._tried = NOBODY
            self._forgive_at = 0.0
            self._backoff *= 2

    async def _wait(self, secs: float | None, waited: bool) -> None:
        self._phase = "waiting"
        before = self._loop.time()
        await self._forwarder.gate.wait(secs, waited=waited)
        self._waited += self._loop.time() - before

    # -- attempts ------------------------------------------------------------------------------------------------------

    async def _try_once(self) -> bool:
        """One attempt; False when another one is due. Raises what the client is to hear, or Cut."""
        held = await self._hold()
        began = self._loop.time()
        self._attempts += 1
        try:
            await self._attempt(held)
            return True
        except Again as again:
            failed = _bare(again)
            _bare(failed.error)
        self._failure = failed.error
        if failed.repeat:
            self._repeats += 1
        else:
            self._patience -= self._loop.time() - began
        if self._repeats > 1 or self._patience <= 0:
            raise failed.error
        if failed.skip:
            self._tried |= {held.replica.index}
        self._forwarder.observer.retried(held.replica.index, failed.reason)
        return False

    async def _attempt(self, held: Held) -> None:
        """Ask, judge, relay. Raises Again, Cut, or an error for the client. Gives back what was held, always."""
        forwarder, relay, replica = self._forwarder, self._relay, held.replica
        response: UpstreamResponse | None = None
        ok = False
        self._phase = "asked"
        held.on_lost = self._interrupt.fire
        try:
            headers, body = self._outgoing(held.served)
            response = await forwarder.transport.request(
                replica.endpoint, self._scope["method"], self._target, headers=headers, body=body
            )
            seen = None
            if response.status >= 400:
                seen = await judge(forwarder, response, held, repeated=self._repeats > 0, tried=self._tried)
            await relay.run(
                response,
                seen,
                held.served,
                forwarder.stamps(held),
                learn=self._routed,
                began=self._on_began,
                completed=self._on_completed,
            )
            ok = response.status < 400
            forwarder.answered(replica.index, response.status)
        except UpstreamError as error:
            held.on_lost = None
            forwarder.failed(replica.index, error.message)
            if relay.status is not None:
                raise Cut(f"replica {replica.index}: {error.message}") from None
            raise broken(error) from None
        except asyncio.CancelledError:
            if not self._interrupt.caught() or self._interrupt.left:
                raise
            if relay.status is not None:
                raise Cut(f"replica {replica.index} was declared dead") from None
            raise declared_dead() from None
        finally:
            held.on_lost = None
            if response is not None and not relay.complete:
                response.abort()
            held.release(ok=ok, usage=relay.learned.usage)

    def _outgoing(self, served: Served | None) -> tuple[Headers, bytes]:
        """Header lines and body for the replica; both untouched unless the name has to change."""
        headers: Headers = self._scope["headers"]
        if served is None or served.upstream == self._model:
            return headers, self._body
        if served.name != served.upstream:  # the answer has to be readable
            headers = [line for line in headers if line[0] != b"accept-encoding"]
        return headers, with_model(self._body, served.upstream)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _outcome(self, cut: bool) -> Outcome:
        held, relay, began = self._held, self._relay, self._began
        return Outcome(
            path=self._scope["path"],
            status=relay.status,
            replica=held.replica.index if held is not None else None,
            decision=held.decision if held is not None else None,
            served=held.served if held is not None else None,
            usage=relay.learned.usage,
            response_id=relay.learned.response_id,
            request_bytes=len(self._body),
            response_bytes=relay.sent,
            waited_secs=self._waited,
            first_byte_secs=self._answered - began if self._answered is not None else None,
            total_secs=self._loop.time() - began,
            attempts=self._attempts,
            left=self._interrupt.left,
            cut=cut,
            n=self._request.n,
            max_tokens=self._request.max_tokens,
            stream=self._request.stream,
        )


def _bare(error: E) -> E:
    """Without its way here: a traceback holds frames, and these hold the error and the whole request, in a circle that
    only a rare collection finds (see `proxy.garbage`)."""
    error.__traceback__ = error.__context__ = None
    return error
