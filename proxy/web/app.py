"""Wiring: one ASGI application out of fleet, control plane and data path, and its start and stop."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

import proxy
from proxy.config import Settings, is_loopback
from proxy.control.adapters import AdapterChanges
from proxy.control.discovery import Follower
from proxy.control.journal import Journal
from proxy.control.membership import Membership
from proxy.control.plane import Plane
from proxy.control.reconcile import Reconciler
from proxy.control.records import TransactionRecord
from proxy.control.switches import Switches
from proxy.errors import BadRequest, ConfigError, LorafleetError, MethodNotAllowed, NotFound, Unauthorized, Unavailable
from proxy.fleet import Fleet
from proxy.garbage import Sweeper
from proxy.metrics import Metrics
from proxy.receipt_file import ReceiptFile
from proxy.receipts import Receipts
from proxy.replica_settings import check_url
from proxy.routing.router import Router
from proxy.upstream.aiohttp_transport import AiohttpTransport
from proxy.upstream.kv_events import Subscriptions
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.resolve import resolve
from proxy.upstream.transport import Endpoint, Transport
from proxy.upstream.vllm import VllmCalls
from proxy.web.asgi import Receive, Scope, Send, send_error
from proxy.web.control import ControlApi, error_response
from proxy.web.control import Endpoint as HttpEndpoint
from proxy.web.fleet_api import FleetApi
from proxy.web.fleet_view import Settings as ViewSettings
from proxy.web.forward import Forwarder, ForwardSettings
from proxy.web.history import History
from proxy.web.observe import Observer, Tee
from proxy.web.page import status_page

logger = logging.getLogger("lorafleet")

RESOLVE_SECS = 5.0
"""Between two look-ups of a dns:// name."""

ROUTED = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
TO_ANY = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/completions/render",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
        "/v1/chat/completions/derender",
        "/v1/messages/count_tokens",
    }
)
OPEN = frozenset({("GET", "/health"), ("GET", "/ping"), ("GET", "/"), ("HEAD", "/")})
"""Answered without the API key: how many replicas are ready, and the empty status page (which asks for the key)."""


@dataclass(slots=True)
class Parts:
    """Everything that was wired, for the lifespan and for tests."""

    fleet: Fleet
    transport: Transport
    plane: Plane
    adapters: AdapterChanges
    switches: Switches
    reconciler: Reconciler
    forwarder: Forwarder
    metrics: Metrics
    history: History


class App:
    """The ASGI application. `parts` are its organs; `on_started` runs once it accepts requests."""

    def __init__(self, settings: Settings, on_started: Callable[[], None] = lambda: None) -> None:
        self._settings = settings
        self._on_started = on_started
        self._key = settings.api_key.value.encode() if settings.api_key else None
        self._local = self._key is None and is_loopback(settings.host)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        fleet = Fleet(settings.endpoints, Router(settings.policy))
        history = History()
        transport: Transport = AiohttpTransport() if settings.transport == "aiohttp" else LeanTransport()
        metrics = Metrics(fleet)
        calls = VllmCalls(transport)

        def on_record(record: TransactionRecord) -> None:
            metrics.transaction(record)
            history.mark(record.kind, record.outcome, record.name)

        fleet_names = [*(endpoint.base for endpoint in settings.endpoints), *map(str, settings.groups)]
        journal = Journal(settings.state_dir, fleet_names)
        plane = Plane(fleet, calls, journal, settings.control, on_record=on_record)
        adapters, switches = AdapterChanges(plane), Switches(plane, metrics.pause_lease_expired)
        reconciler = Reconciler(plane)
        observer: Observer = metrics
        self._receipts: Receipts | None = None
        if settings.receipts is not None:
            file = ReceiptFile(settings.receipts, settings.receipts_max_bytes)
            self._receipts = Receipts(file, metrics.receipts)
            observer = Tee(metrics, self._receipts)
        forwarder = Forwarder(
            fleet,
            transport,
            ForwardSettings(settings.max_body_bytes, settings.wait_ready_secs, settings.pause_queue),
            observer,
        )
        self.parts = Parts(fleet, transport, plane, adapters, switches, reconciler, forwarder, metrics, history)
        view = ViewSettings(
            proxy.__version__,
            settings.policy,
            settings.pause_mode,
            settings.min_ready,
            settings.control.pause_lease_secs,
            follows=bool(settings.groups),
        )
        named = [endpoint.base for endpoint in settings.endpoints]
        membership = Membership(plane, reconciler, self._endpoint, named)
        self._followers = [Follower(group, membership, resolve, RESOLVE_SECS) for group in settings.groups]
        self._events = self._subscriptions(settings, fleet)
        self._control = ControlApi(adapters, switches)
        self._post_only = ROUTED | TO_ANY | self._control.routes.keys()
        self._fleet_api = FleetApi(fleet, plane, switches, membership, calls, metrics, history, view)
        plane.open()
        membership.restore()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._http(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:  # no websocket is part of the contract
            await send({"type": "websocket.close", "code": 1003})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"]
        if self._key is not None and (method, path) not in OPEN and not self._authorized(scope):
            await send_error(send, Unauthorized("send the API key as `Authorization: Bearer ...`"))
            return
        if method == "POST" and path in ROUTED:
            await self.parts.forwarder.completion(scope, receive, send)
            return
        endpoint = self._control.routes.get(path) if method == "POST" else None
        endpoint = endpoint or self._fleet_api.endpoint(method, path)
        if endpoint is not None:
            await self._answer(endpoint, scope, receive, send)
        elif path == "/" and method in ("GET", "HEAD"):
            await status_page(scope, receive, send)
        elif path in TO_ANY if method == "POST" else method == "GET" and path not in self._post_only and _plain(path):
            await self.parts.forwarder.to_any(scope, receive, send)
        elif path in self._post_only:
            await send_error(send, MethodNotAllowed(f"{path} is asked with POST"))
        else:
            await send_error(send, NotFound(f"lorafleet does not forward {method} {path}"))

    async def _answer(self, endpoint: HttpEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            if scope["method"] != "GET":
                _refuse_other_sites(scope, local=self._local)
            response = await endpoint(Request(scope, receive))
        except LorafleetError as error:
            response = error_response(error)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            response = error_response(Unavailable("lorafleet is ending; the change was not finished"))
        await response(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        assert self._key is not None
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                return bool(scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), self._key))
            if name == b"x-api-key":
                return hmac.compare_digest(value.strip(), self._key)
        return False

    @staticmethod
    def _subscriptions(settings: Settings, fleet: Fleet) -> Subscriptions | None:
        if settings.kv_events is None:
            return None
        wanted = settings.kv_events
        return Subscriptions(
            fleet.router.feed, wanted.port, wanted.endpoints, lambda: next(iter(fleet.base_models()), "")
        )

    def _endpoint(self, url: object) -> Endpoint:
        try:
            return Endpoint(check_url(url, "url"), self._settings.default_token)
        except ConfigError as error:
            raise BadRequest(error.message, param="url") from None

    # -- life ----------------------------------------------------------------------------------------------------------

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.start()
        await send({"type": "lifespan.startup.complete"})
        self._on_started()
        await receive()
        await self.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def start(self) -> None:
        if self._receipts is not None:
            self._receipts.start()
        self.parts.switches.arm_lease()
        self.parts.reconciler.start()
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tick()), *(loop.create_task(f.run()) for f in self._followers)]

    async def begin_stop(self) -> None:
        """End changes that are under way: the journal says how the next process goes on with them."""
        self._stopping = True
        await self.parts.plane.cancel()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._events is not None:
            await self._events.stop()
        self.parts.switches.stop()
        await self.parts.reconciler.stop()
        await self.parts.plane.stop()
        await self.parts.transport.close()
        if self._receipts is not None:
            await asyncio.to_thread(self._receipts.close)

    async def _tick(self) -> None:
        """Once a second: a sample for the page, and how late the event loop is."""
        clock, metrics = self.parts.fleet.clock, self.parts.metrics
        started = due = clock()
        sweeper = Sweeper(started)
        while True:
            if self._events is not None:
                self._events.sync({r.index: r.endpoint.base for r in self.parts.fleet.members()})
            due += 1.0
            await asyncio.sleep(max(0.0, due - clock()))
            metrics.loop_lag(max(0.0, clock() - due))
            due = max(due, clock() - 1.0)
            sweeper.tick(clock(), busy=bool(self.parts.fleet.running))
            self.parts.history.tick(clock() - started, metrics.reading())


def _refuse_other_sites(scope: Scope, *, local: bool) -> None:
    """A web page elsewhere can make a browser on this machine POST here. Raises BadRequest when a browser says so.

    `local`: only this machine can connect, and no key is asked for. Then a page may also have had its own name resolved
    to this machine, so that the browser takes us for its site: the name must be one of this machine's.
    """
    origin = host = b""
    for name, value in scope["headers"]:
        if name == b"origin":
            origin = value.lower()
        elif name == b"host":
            host = value.lower()
    if origin and (origin.partition(b"://")[2] != host or (local and not _names_this_machine(host))):
        raise BadRequest("a page of another site may not control the fleet")


def _names_this_machine(host: bytes) -> bool:
    name, colon, port = host.decode("latin-1").rpartition(":")
    return is_loopback(name if colon and port.isdigit() else f"{name}{colon}{port}")


def _plain(path: str) -> bool:
    """Whether everybody who reads this path takes it for the same one: no dots, doubled slashes or left-over escapes
    that something between here and a replica may resolve to another."""
    parts = path.split("/")
    return "%" not in path and "\\" not in path and not {"", ".", ".."}.intersection(parts[1:])
