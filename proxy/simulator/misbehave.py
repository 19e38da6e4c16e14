"""Acting out a fault: what happens instead of, or around, a handler (see ``faults`` for the kinds)."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import msgspec

from proxy.simulator.admin import load_lora, text
from proxy.simulator.faults import Fault
from proxy.simulator.http import JSON_TYPE, HttpError, Request, Response, error, json_response
from proxy.simulator.replica import Replica

Handler = Callable[[Replica, Request], Awaitable[Response]]


class Cut(Exception):
    """The connection is to be reset now."""


class Misbehaviour:
    """One call that goes wrong."""

    def __init__(self, replica: Replica, fault: Fault, request: Request) -> None:
        self._replica = replica
        self._fault = fault
        self._request = request

    async def answer(self, route: str, handler: Handler) -> Response:
        """The response to send; raises Cut for none, HttpError for errors that are answers."""
        fault, replica, request = self._fault, self._replica, self._request
        kind = fault.kind
        if kind in ("refuse", "restart", "crash"):
            (replica.on_refuse if kind == "refuse" else replica.die)(None if kind == "crash" else fault.secs or 0.0)
            raise Cut
        if kind == "slow":
            await asyncio.sleep(fault.secs or 0.0)
            return await handler(replica, request)
        if kind in ("lost_answer", "reset", "hang", "error", "garbage"):
            if fault.effect or kind == "lost_answer":
                await _discard(await _result(handler, replica, request))
            return await self._no_answer(handler)
        if kind in ("reset_body", "stall"):
            return self._broken(await _result(handler, replica, request))
        if route == "load":
            return await self._load(handler)
        if kind == "no_effect":
            return _success(route, request)
        return await handler(replica, request)

    async def _no_answer(self, handler: Handler) -> Response:
        fault = self._fault
        if fault.kind == "hang":
            await asyncio.sleep(fault.secs if fault.secs is not None else 86400)
            return await handler(self._replica, self._request)
        if fault.kind == "error":
            words = {500: "Internal server error", 503: "Service Unavailable", 502: "Bad Gateway"}
            raise error(fault.status, words.get(fault.status, "Simulated fault"), "InternalServerError")
        if fault.kind == "garbage":
            return Response(200, b"<html>\x00 this is no answer of vLLM", (JSON_TYPE,))
        raise Cut

    async def _load(self, handler: Handler) -> Response:
        kind, request = self._fault.kind, self._request
        if kind == "wrong_weights":
            return await load_lora(self._replica, request, self._fault)
        body = msgspec.json.decode(request.body)
        name, path = body.get("lora_name", ""), body.get("lora_path", "")
        if kind == "not_visible":
            raise error(404, f"Loading lora {name} failed: No adapter found for {path}", "NotFoundError")
        if kind == "already_loaded":
            message = (
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place,"
                " set 'load_inplace' to True."
            )
            raise error(400, message, "InvalidUserInput")
        if kind == "no_effect":
            self._replica.pretend_load(name, path)
            return text(f"Success: LoRA adapter '{name}' added successfully.")
        return await handler(self._replica, request)

    def _broken(self, response: Response) -> Response:
        """The response up to the middle, then a cut or silence."""
        fault = self._fault
        whole = response.stream
        length = (b"content-length", str(len(response.body)).encode())

        async def part() -> AsyncGenerator[bytes, None]:
            if whole is None:
                yield response.body[: len(response.body) // 2]
            else:
                async with aclosing(whole) as chunks:
                    left = fault.after
                    while left > 0 and (chunk := await anext(chunks, None)) is not None:
                        yield chunk
                        left -= 1
            # The bytes must be out before the reset overtakes them.
            await asyncio.sleep(0.02)
            if fault.kind == "stall":
                await asyncio.sleep(fault.secs if fault.secs is not None else 86400)
            raise Cut

        headers = response.headers if whole is not None else (*response.headers, length)
        return Response(response.status, b"", headers, part())


async def _result(handler: Handler, replica: Replica, request: Request) -> Response:
    try:
        return await handler(replica, request)
    except HttpError as problem:
        return problem.response


async def _discard(response: Response) -> None:
    if response.stream is not None:
        async for _ in response.stream:
            pass


def _success(route: str, request: Request) -> Response:
    """What a control call answers when all is well."""
    if route == "unload":
        name = msgspec.json.decode(request.body).get("lora_name", "")
        return text(f"Success: LoRA adapter '{name}' removed successfully.")
    answers = {"pause": {"status": "paused"}, "resume": {"status": "resumed"}, "reset": {"success": True}}
    answer = answers.get(route)
    return Response() if answer is None else json_response(answer)
