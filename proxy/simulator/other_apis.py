"""POST /v1/responses, /v1/messages, /tokenize, /detokenize: reduced, but in vLLM's shapes."""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from proxy.simulator.chat import read_messages
from proxy.simulator.engine import EngineDead
from proxy.simulator.generation import Generation, new_id, request_id
from proxy.simulator.http import (
    HttpError,
    Request,
    Response,
    error_body,
    event_stream,
    invalid,
    json_response,
    named_sse,
    parse_object,
    typed,
)
from proxy.simulator.replica import ENGINE_DEAD, Replica
from proxy.simulator.sampling import check_prompt, find_model, read_prompts, read_sampling, token_ids
from proxy.simulator.tokenizer import decode, encode, render_chat, token_text

_ANTHROPIC_STOP = {"length": "max_tokens", "stop": "end_turn", "abort": "end_turn"}


async def responses(replica: Replica, request: Request) -> Response:
    """OpenAI's Responses API: one text message out, nothing stored."""
    body = parse_object(request)
    options = replica.options
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid(
            [{"type": "missing", "loc": ("body", "input"), "msg": "Field required", "input": None}], "body.input"
        )
    if body.get("instructions"):
        given = [{"role": "system", "content": body["instructions"]}, *given]
    prompt = render_chat([m for m in given if isinstance(m, dict) and "role" in m])
    max_tokens = typed(body, "max_output_tokens", int)
    sampling = read_sampling({**body, "n": 1}, options, max_tokens, None)
    lora = find_model(replica, body.get("model"))
    limit = check_prompt(prompt, max_tokens, options, "max_output_tokens")
    generation = Generation(replica, lora, sampling, [prompt], [limit], f"resp_{request_id(request, body)}")
    shell = {
        "id": f"resp_{new_id()}",
        "created_at": int(time.time()),
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata"),
        "model": lora.name if lora else options.model_name,
        "object": "response",
        "output": [],
        "parallel_tool_calls": True,
        "temperature": body.get("temperature", 1.0),
        "tool_choice": "none",
        "tools": [],
        "top_p": body.get("top_p", 1.0),
        "background": False,
        "max_output_tokens": limit,
        "previous_response_id": None,
        "service_tier": "auto",
        "status": "in_progress",
        "truncation": "disabled",
        "usage": None,
        "user": body.get("user"),
    }
    if sampling.stream:
        return event_stream(generation.during(_responses_stream(generation, shell)))
    async with generation:
        await generation.finish()
        return json_response(_finished_response(generation, shell))


def _finished_response(generation: Generation, shell: dict[str, Any]) -> dict[str, Any]:
    sequence = generation.sequences[0]
    cut = sequence.finish_reason == "length"
    part: dict[str, Any] = {"annotations": [], "text": decode(sequence.output), "type": "output_text", "logprobs": None}
    message = {
        "id": f"msg_{new_id()}",
        "content": [part],
        "role": "assistant",
        "status": "completed",
        "type": "message",
    }
    return {
        **shell,
        "output": [message],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {"cached_tokens": generation.cached_tokens},
            "output_tokens": sequence.produced,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": generation.prompt_tokens + sequence.produced,
        },
    }


async def _responses_stream(generation: Generation, shell: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    number = -1

    def event(kind: str, **details: Any) -> bytes:
        nonlocal number
        number += 1
        return named_sse(kind, {**details, "sequence_number": number, "type": kind})

    item, where = new_id(), {"output_index": 0, "content_index": 0}
    try:
        yield event("response.created", response=shell)
        yield event("response.in_progress", response=shell)
        opened = {"id": item, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
        yield event("response.output_item.added", item=opened, output_index=0)
        async for delta in generation.deltas():
            yield event("response.output_text.delta", delta=delta.text, item_id=item, logprobs=[], **where)
        text = decode(generation.sequences[0].output)
        yield event("response.output_text.done", item_id=item, text=text, logprobs=[], **where)
        done = _finished_response(generation, shell)
        yield event("response.output_item.done", item=done["output"][0], output_index=0)
        yield event("response.completed", response=done)
    except EngineDead:
        yield event("error", **error_body(ENGINE_DEAD, "InternalServerError", 500)["error"])


async def messages(replica: Replica, request: Request) -> Response:
    """Anthropic's Messages API."""
    try:
        body = parse_object(request)
        options = replica.options
        system = body.get("system")
        merged = [{"role": "system", "content": system}] if system else []
        prompt = read_messages({**body, "messages": merged + typed(body, "messages", list, required=True)})
        max_tokens = typed(body, "max_tokens", int, required=True)
        sampling = read_sampling({**body, "n": 1}, options, max_tokens, None)
        lora = find_model(replica, body.get("model"))
        limit = check_prompt(prompt, max_tokens, options)
    except HttpError as problem:
        problem.response = _anthropic_error(problem.response)
        raise
    name = f"chatcmpl-{request_id(request, body)}"
    generation = Generation(replica, lora, sampling, [prompt], [limit], name)
    model = lora.name if lora else options.model_name
    shell: dict[str, Any] = {
        "id": name,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
    }
    if sampling.stream:
        return event_stream(generation.during(_messages_stream(generation, shell)))
    async with generation:
        await generation.finish()
        sequence = generation.sequences[0]
        content = [{"type": "text", "text": decode(sequence.output)}]
        reason = _ANTHROPIC_STOP.get(sequence.finish_reason or "", "end_turn")
        return json_response(
            {**shell, "content": content, "stop_reason": reason, "usage": _anthropic_usage(generation)}
        )


def _anthropic_error(response: Response) -> Response:
    problem = msgspec.json.decode(response.body)["error"]
    return json_response(
        {"type": "error", "error": {"type": problem["type"], "message": problem["message"]}}, response.status
    )


def _anthropic_usage(generation: Generation) -> dict[str, int]:
    cached, created = generation.cached_tokens, generation.created_tokens
    return {
        "input_tokens": generation.prompt_tokens - cached - created,
        "output_tokens": generation.completion_tokens,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
    }


async def _messages_stream(generation: Generation, shell: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    def event(kind: str, **details: Any) -> bytes:
        return named_sse(kind, {"type": kind, **details})

    try:
        usage = {"input_tokens": generation.prompt_tokens, "output_tokens": 0}
        yield event("message_start", message={**shell, "stop_sequence": None, "usage": usage})
        yield event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
        async for delta in generation.deltas():
            yield event("content_block_delta", delta={"type": "text_delta", "text": delta.text}, index=0)
        yield event("content_block_stop", index=0)
        reason = _ANTHROPIC_STOP.get(generation.sequences[0].finish_reason or "", "end_turn")
        yield event("message_delta", delta={"stop_reason": reason}, usage=_anthropic_usage(generation))
        yield event("message_stop")
    except EngineDead:
        yield event("error", error={"type": "InternalServerError", "message": ENGINE_DEAD})


async def tokenize(replica: Replica, request: Request) -> Response:
    body = parse_object(request)
    prompt = body.get("prompt")
    ids = encode(prompt) if isinstance(prompt, str) else read_messages(body)
    find_model(replica, body.get("model"))
    strings = [token_text(token) for token in ids] if body.get("return_token_strs") else None
    return json_response(
        {"count": len(ids), "max_model_len": replica.options.context, "tokens": ids, "token_strs": strings}
    )


async def render(replica: Replica, request: Request) -> Response:
    """What a completion or a chat would hand to /inference/v1/generate: one object a prompt (a chat: just the one)."""
    body = parse_object(request)
    chat = request.path.startswith("/v1/chat/")
    prompts = [read_messages(body)] if chat else [token_ids(prompt) for prompt in read_prompts(body)]
    find_model(replica, body.get("model"))
    parameters = {"temperature": body.get("temperature", 1.0), "max_tokens": body.get("max_tokens")}
    prefix = "chatcmpl" if chat else "cmpl"
    rendered = [
        {
            "request_id": f"{prefix}-{new_id()}",
            "token_ids": ids,
            "features": None,
            "sampling_params": parameters,
            "model": body.get("model"),
            "stream": bool(body.get("stream")),
            "stream_options": body.get("stream_options"),
            "cache_salt": body.get("cache_salt"),
            "priority": 0,
        }
        for ids in prompts
    ]
    return json_response(rendered[0] if chat else rendered)


async def count_tokens(replica: Replica, request: Request) -> Response:
    return json_response({"input_tokens": len(read_messages(parse_object(request)))})


async def detokenize(replica: Replica, request: Request) -> Response:
    body = parse_object(request)
    ids = typed(body, "tokens", list, required=True)
    find_model(replica, body.get("model"))
    return json_response({"prompt": decode(ids)})
