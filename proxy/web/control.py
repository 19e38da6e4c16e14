"""The broadcast endpoints: HTTP in, a change of the control plane out. Translates, decides nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from proxy.control.adapters import AdapterChanges
from proxy.control.switches import Switches
from proxy.errors import BadRequest, BodyTooLarge, LorafleetError, NotSupported, Unavailable

MAX_CONTROL_BODY = 1 << 20
"""Bytes; a control request is a few hundred."""

NOT_YET = (
    "{} would change weights on one replica only: lorafleet does not carry fleet-wide weight transfer yet. Train with "
    "a LoRA adapter (peft_config), which needs none"
)
UNSUPPORTED = frozenset(
    {
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
    }
)

Endpoint = Callable[[Request], Awaitable[Response]]


class ControlApi:
    """Starlette endpoints over the control plane; `routes` maps each POST path to its endpoint."""

    def __init__(self, adapters: AdapterChanges, switches: Switches) -> None:
        self._adapters = adapters
        self._switches = switches
        self.routes: dict[str, Endpoint] = {
            "/v1/load_lora_adapter": self.load,
            "/v1/unload_lora_adapter": self.unload,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset,
            "/abort_requests": self.abort,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            **dict.fromkeys(UNSUPPORTED, self.unsupported),
        }

    async def load(self, request: Request) -> Response:
        """`load_inplace` and whatever else the client sent beside name, path and digest is never passed on."""
        body = await json_object(request)
        said = await self._adapters.load(body.get("lora_name"), body.get("lora_path"), body.get("digest"))
        return PlainTextResponse(said)

    async def unload(self, request: Request) -> Response:
        body = await json_object(request)
        return PlainTextResponse(await self._adapters.unload(body.get("lora_name")))

    async def pause(self, request: Request) -> Response:
        return JSONResponse(await self._switches.pause(request.url.query))

    async def resume(self, request: Request) -> Response:
        return JSONResponse(await self._switches.resume())

    async def reset(self, request: Request) -> Response:
        return JSONResponse(await self._switches.reset_prefix_cache(request.url.query))

    async def abort(self, request: Request) -> Response:
        return JSONResponse(await self._switches.abort_requests(await read_small(request)))

    async def sleep(self, request: Request) -> Response:
        await self._switches.sleep(request.url.query)
        return Response(status_code=200)

    async def wake_up(self, request: Request) -> Response:
        await self._switches.wake_up(request.url.query)
        return Response(status_code=200)

    async def unsupported(self, request: Request) -> Response:
        raise NotSupported(NOT_YET.format(request.url.path))


def error_response(error: LorafleetError) -> Response:
    headers = {"retry-after": str(error.retry_after_secs)} if isinstance(error, Unavailable) else None
    return Response(error.json(), status_code=error.status, media_type="application/json", headers=headers)


async def read_small(request: Request) -> bytes:
    """The body of a control request. Raises BodyTooLarge."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_CONTROL_BODY:
            raise BodyTooLarge(f"a control request is at most {MAX_CONTROL_BODY} bytes")
        pieces.append(piece)
    return b"".join(pieces)


async def json_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object. Raises BadRequest."""
    raw = await read_small(request)
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value
