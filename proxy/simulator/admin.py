"""The control routes: adapters, pause, caches, sleep, and the dev endpoints that only answer 200."""

from typing import Any

import msgspec

from proxy.simulator.faults import Fault
from proxy.simulator.http import (
    HttpError,
    Request,
    Response,
    error,
    error_body,
    invalid,
    json_response,
    parse_object,
    typed,
)
from proxy.simulator.replica import LoadRefused, Replica

_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


async def load_lora(replica: Replica, request: Request, fault: Fault | None = None) -> Response:
    body = parse_object(request)
    name = typed(body, "lora_name", str, required=True)
    path = typed(body, "lora_path", str, required=True)
    inplace = typed(body, "load_inplace", bool, False)
    if not replica.options.enable_lora:
        raise error(500, "LoRA is not enabled", "InternalServerError")
    wrong = (fault.path or "") if fault is not None and fault.kind == "wrong_weights" else None
    try:
        await replica.load(name, path, inplace, wrong)
    except LoadRefused as refusal:
        raise HttpError(refusal.status, error_body(refusal.message, refusal.kind, refusal.status)) from None
    return text(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora(replica: Replica, request: Request) -> Response:
    name = typed(parse_object(request), "lora_name", str, required=True)
    if not name:
        raise error(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "InvalidUserInput")
    if not replica.unload(name):
        raise error(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
    return text(f"Success: LoRA adapter '{name}' removed successfully.")


def text(message: str) -> Response:
    """Plain text without a content type, as FastAPI's bare Response."""
    return Response(200, message.encode())


def flag(query: dict[str, list[str]], name: str, default: bool) -> bool:
    """A query flag as pydantic reads one; HttpError 400 otherwise."""
    value = query.get(name, [str(default)])[-1].lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    message = "Input should be a valid boolean, unable to interpret input"
    problem = {"type": "bool_parsing", "loc": ("query", name), "msg": message, "input": value}
    raise invalid([problem], f"query.{name}")


async def pause(replica: Replica, request: Request) -> Response:
    query = request.query()
    mode = query.get("mode", ["abort"])[-1]
    if mode not in ("abort", "wait", "keep"):
        expected = "'abort', 'wait' or 'keep'"
        problem = {
            "type": "literal_error",
            "loc": ("query", "mode"),
            "msg": f"Input should be {expected}",
            "input": mode,
        }
        raise invalid([{**problem, "ctx": {"expected": expected}}], "query.mode")
    if flag(query, "wait_for_inflight_requests", False):
        mode = "wait"
    await replica.live.pause(mode, flag(query, "clear_cache", True))
    return json_response({"status": "paused"})


async def resume(replica: Replica, request: Request) -> Response:
    replica.engine.resume(replica.live.now())
    replica.live.poke()
    return json_response({"status": "resumed"})


async def is_paused(replica: Replica, request: Request) -> Response:
    return json_response({"is_paused": replica.engine.paused is not None})


async def reset_prefix_cache(replica: Replica, request: Request) -> Response:
    query = request.query()
    running_too = flag(query, "reset_running_requests", False)
    flag(query, "reset_external", False)
    success = replica.engine.reset_prefix_cache(replica.live.now(), running_too)
    replica.live.poke()
    return json_response({"success": success})


async def abort_requests(replica: Replica, request: Request) -> Response:
    """Named requests by their external ids (``cmpl-...`` and the like), or all; the count is vLLM's: ids asked for."""
    try:
        ids = msgspec.json.decode(request.body).get("request_ids")
    except (msgspec.DecodeError, AttributeError):
        raise error(400, "Invalid JSON format", "Bad Request") from None
    engine = replica.engine
    everything = [s.request.id for s in (*engine.running, *engine.waiting)]
    # An id stands for all its choices: the engine's own ids add "-<prompt>" and "_<choice>".
    wanted = [known for known in everything if not ids or any(known == i or known.startswith(f"{i}-") for i in ids)]
    engine.abort(wanted, replica.live.now())
    replica.live.poke()
    return json_response({"status": "aborted", "aborted": len(ids or everything)})


async def sleep(replica: Replica, request: Request) -> Response:
    query = request.query()
    level = int(query.get("level", ["1"])[-1])
    await replica.live.pause(query.get("mode", ["abort"])[-1], level >= 1)
    replica.sleep_level = level
    return Response()


async def wake_up(replica: Replica, request: Request) -> Response:
    tags = request.query().get("tags", [])
    if not tags or set(tags) - {"scheduling"}:
        replica.sleep_level = 0
    if replica.sleep_level < 1:
        replica.engine.resume(replica.live.now())
        replica.live.poke()
    return Response()


async def is_sleeping(replica: Replica, request: Request) -> Response:
    """A paused engine counts as sleeping, as in 0.27.1."""
    return json_response({"is_sleeping": replica.engine.paused is not None or replica.sleep_level > 0})


async def accept(replica: Replica, request: Request) -> Response:
    """Dev endpoints that the simulator has nothing to do for."""
    answers: dict[str, Any] = {
        "/init_weight_transfer_engine": {"message": "Weight transfer initialized"},
        "/start_weight_update": {"message": "Weight update started"},
        "/update_weights": {"message": "Weights updated"},
        "/finish_weight_update": {"message": "Weight update finished"},
        "/collective_rpc": {"results": [None]},
    }
    answer = answers.get(request.path)
    return Response() if answer is None else json_response(answer)
