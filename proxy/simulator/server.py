"""The ASGI app of one replica: authentication, routes, faults, and answers written out.

Routes and their guards are vLLM's (``AuthenticationMiddleware``: only paths below /v1, /v2, /inference and /cohere).
What is ours lies below /_sim: GET /_sim/state, and GET, POST (one fault or a list), DELETE /_sim/faults (?route=...).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.simulator import admin, chat, completions, info, other_apis
from proxy.simulator.faults import Fault
from proxy.simulator.http import HttpError, Request, Response, json_response
from proxy.simulator.httpd import CONNECTION, Connection, Message, Scope
from proxy.simulator.misbehave import Cut, Misbehaviour
from proxy.simulator.replica import Replica

Handler = Callable[[Replica, Request], Awaitable[Response]]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GUARDED = ("/v1", "/v2", "/inference", "/cohere")


@dataclass(frozen=True, slots=True)
class Route:
    """``name``: what faults and call counters call it; ``generates``: a client that leaves cancels it, as in vLLM."""

    name: str
    methods: tuple[str, ...]
    handler: Handler
    generates: bool = False
    needs: str = ""
    """``dev`` or ``lora``: there only in that mode."""


def _routes() -> dict[str, Route]:
    def post(name: str, handler: Handler, needs: str = "", generates: bool = False) -> Route:
        return Route(name, ("POST",), handler, generates, needs)

    def get(name: str, handler: Handler, needs: str = "") -> Route:
        return Route(name, ("GET",), handler, False, needs)

    return {
        "/health": get("health", info.health),
        "/ping": Route("ping", ("GET", "POST"), info.health),
        "/load": get("server_load", info.load),
        "/version": get("version", info.version),
        "/metrics": get("metrics", info.metrics),
        "/openapi.json": get("openapi", info.openapi),
        "/v1/models": get("models", info.models),
        "/v1/completions": post("completion", completions.completions, generates=True),
        "/v1/chat/completions": post("completion", chat.chat_completions, generates=True),
        "/v1/responses": post("completion", other_apis.responses, generates=True),
        "/v1/messages": post("completion", other_apis.messages, generates=True),
        "/inference/v1/generate": post("completion", chat.generate, generates=True),
        "/tokenize": post("tokenize", other_apis.tokenize),
        "/detokenize": post("detokenize", other_apis.detokenize),
        "/v1/completions/render": post("render", other_apis.render),
        "/v1/chat/completions/render": post("render", other_apis.render),
        "/v1/messages/count_tokens": post("count_tokens", other_apis.count_tokens),
        "/v1/load_lora_adapter": post("load", admin.load_lora, "lora"),
        "/v1/unload_lora_adapter": post("unload", admin.unload_lora, "lora"),
        "/pause": post("pause", admin.pause, "dev"),
        "/resume": post("resume", admin.resume, "dev"),
        "/is_paused": get("is_paused", admin.is_paused, "dev"),
        "/reset_prefix_cache": post("reset", admin.reset_prefix_cache, "dev"),
        "/reset_mm_cache": post("reset_mm", info.ok, "dev"),
        "/reset_encoder_cache": post("reset_encoder", info.ok, "dev"),
        "/abort_requests": post("abort", admin.abort_requests, "dev"),
        "/sleep": post("sleep", admin.sleep, "dev"),
        "/wake_up": post("wake_up", admin.wake_up, "dev"),
        "/is_sleeping": get("is_sleeping", admin.is_sleeping, "dev"),
        "/server_info": get("server_info", info.server_info, "dev"),
        "/get_world_size": get("get_world_size", info.world_size, "dev"),
        "/collective_rpc": post("collective_rpc", admin.accept, "dev"),
        "/init_weight_transfer_engine": post("weights", admin.accept, "dev"),
        "/start_weight_update": post("weights", admin.accept, "dev"),
        "/update_weights": post("weights", admin.accept, "dev"),
        "/finish_weight_update": post("weights", admin.accept, "dev"),
    }


ROUTES = _routes()


class App:
    """ASGI callable over one Replica."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request = Request(scope["method"], scope["path"], scope["query_string"], headers, body)
        connection: Connection | None = scope.get("extensions", {}).get(CONNECTION)
        if request.path.startswith("/_sim"):
            await _write(await self._own(request), send)
            return
        route = ROUTES.get(request.path)
        name = _call_name(route, request)
        self.replica.record(name, headers)
        refusal = self._refusal(request, route)
        if refusal is not None or route is None:
            await _write(refusal or Response(404), send)
            return
        fault = self.replica.faults.take(name, _subject(request), self.replica.live.now())
        silent = fault is not None and fault.kind in ("hang", "stall")
        watcher = _cancel_when_gone(receive) if route.generates or silent else None
        try:
            await self._answer(route, request, fault, connection, send)
        except asyncio.CancelledError:
            if watcher is None or not watcher.done():
                raise
        except Cut:
            if connection is None:
                raise
            connection.reset()
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _answer(
        self, route: Route, request: Request, fault: Fault | None, connection: Connection | None, send: Send
    ) -> None:
        try:
            if fault is None:
                response = await route.handler(self.replica, request)
            else:
                response = await Misbehaviour(self.replica, fault, request).answer(route.name, route.handler)
        except HttpError as problem:
            response = problem.response
        await _write(response, send)

    def _refusal(self, request: Request, route: Route | None) -> Response | None:
        options = self.replica.options
        guarded = options.require_token_everywhere or request.path.startswith(GUARDED)
        if options.api_key is not None and guarded and request.method != "OPTIONS":
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token != options.api_key:
                return json_response({"error": "Unauthorized"}, 401)
        absent = {"dev": not options.dev_mode, "lora": not options.runtime_lora}
        if route is None or absent.get(route.needs, False):
            return json_response({"detail": "Not Found"}, 404)
        if request.method not in route.methods:
            allow = (b"allow", ", ".join(route.methods).encode())
            return json_response({"detail": "Method Not Allowed"}, 405, (allow,))
        return None

    async def _own(self, request: Request) -> Response:
        replica = self.replica
        try:
            if request.path == "/_sim/state":
                return json_response(replica.state())
            if request.path != "/_sim/faults":
                return json_response({"detail": "Not Found"}, 404)
            if request.method == "POST":
                specs = msgspec.json.decode(request.body)
                for spec in specs if isinstance(specs, list) else [specs]:
                    added = replica.faults.add_json(spec, replica.live.now())
                    if added.kind == "refuse" and added.route == "any":
                        # This answer goes out first.
                        asyncio.get_running_loop().call_later(0.05, replica.on_refuse, added.secs)
                        replica.faults.remove(added)
            elif request.method == "DELETE":
                replica.faults.clear(request.query().get("route", [None])[-1])
            return json_response({"faults": replica.faults.active})
        except (ValueError, TypeError) as problem:
            return json_response({"error": str(problem)}, 400)


def _call_name(route: Route | None, request: Request) -> str:
    if route is None:
        return request.path.strip("/").partition("/")[0] or "root"
    if not route.generates:
        return route.name
    try:
        request.json = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return route.name
    return "stream" if isinstance(request.json, dict) and request.json.get("stream") is True else route.name


def _subject(request: Request) -> str | None:
    """The adapter or model that a call is about."""
    content = request.json
    if content is None and request.path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        try:
            content = msgspec.json.decode(request.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
    if not isinstance(content, dict):
        return None
    subject = content.get("lora_name") or content.get("model")
    return subject if isinstance(subject, str) else None


def _cancel_when_gone(receive: Receive) -> "asyncio.Task[None]":
    """A task that cancels the calling one when the client disconnects."""
    handler: asyncio.Task[Any] | None = asyncio.current_task()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if handler is not None:
            asyncio.get_running_loop().call_soon(handler.cancel)

    return asyncio.create_task(watch())


async def _write(response: Response, send: Send) -> None:
    start: Message = {"type": "http.response.start", "status": response.status, "headers": list(response.headers)}
    await send(start)
    if response.stream is None:
        await send({"type": "http.response.body", "body": response.body})
        return
    async with contextlib.aclosing(response.stream) as chunks:
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
