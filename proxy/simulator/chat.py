"""POST /v1/chat/completions and /inference/v1/generate, as vLLM answers them (text only, no tools)."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from proxy.simulator.completions import DONE, alternatives, fingerprint, token_name
from proxy.simulator.engine import EngineDead
from proxy.simulator.generation import Delta, Generation, request_id
from proxy.simulator.http import (
    Request,
    Response,
    bad_request,
    error_body,
    event_stream,
    invalid,
    json_response,
    parse_object,
    sse,
    typed,
)
from proxy.simulator.replica import ENGINE_DEAD, Replica
from proxy.simulator.sampling import check_prompt, find_model, read_sampling
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokenizer import decode, render_chat


def read_messages(body: dict[str, Any]) -> list[int]:
    """Token ids of the body's chat; HttpError 400 for what is none."""
    messages = typed(body, "messages", list, required=True)
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    try:
        return render_chat(messages, body.get("add_generation_prompt", True))
    except ValueError as problem:
        raise invalid([str(problem)], "body.messages") from None


async def chat_completions(replica: Replica, request: Request) -> Response:
    body = parse_object(request)
    options = replica.options
    prompt = read_messages(body)
    max_tokens = typed(body, "max_completion_tokens", int) or typed(body, "max_tokens", int)
    logprobs = typed(body, "top_logprobs", int, 0) if typed(body, "logprobs", bool, False) else None
    sampling = read_sampling(body, options, max_tokens, logprobs)
    lora = find_model(replica, body.get("model"))
    limit = check_prompt(prompt, max_tokens, options)
    name = f"chatcmpl-{request_id(request, body)}"
    generation = Generation(replica, lora, sampling, [prompt], [limit], name)
    model = lora.name if lora else options.model_name
    head = {"id": name, "object": "chat.completion", "created": int(time.time()), "model": model}
    if sampling.stream:
        return event_stream(generation.during(_stream(generation, {**head, "object": "chat.completion.chunk"})))
    async with generation:
        await generation.finish()
        return json_response(
            {
                **head,
                "choices": [_choice(generation, index) for index in range(sampling.n)],
                "service_tier": None,
                "system_fingerprint": fingerprint(replica),
                "usage": generation.usage(created=True),
                "prompt_logprobs": None,
                "prompt_token_ids": prompt if sampling.return_token_ids else None,
                "prompt_text": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )


def _choice(generation: Generation, index: int) -> dict[str, Any]:
    sequence, sampling = generation.sequences[index], generation.sampling
    message = {"role": "assistant", "content": decode(sequence.output), "refusal": None, "annotations": None}
    return {
        "index": index,
        "message": {**message, "audio": None, "function_call": None, "reasoning": None},
        "logprobs": chat_logprobs(generation, sequence, 0, sequence.produced, sampling.as_token_ids),
        "finish_reason": sequence.finish_reason,
        "stop_reason": None,
        "token_ids": sequence.output if sampling.return_token_ids else None,
        "routed_experts": None,
    }


def chat_logprobs(
    generation: Generation, sequence: Sequence, start: int, end: int, as_ids: bool
) -> dict[str, Any] | None:
    """OpenAI's chat shape for tokens start..end-1; None when the request wants none."""
    wanted = generation.sampling.logprobs
    if wanted is None:
        return None
    content = []
    for token, value in zip(sequence.tokens(start, end), sequence.logprobs(start, end), strict=True):
        ranked = [
            {
                "token": token_name(t, as_ids),
                "logprob": lp,
                "bytes": None if as_ids else list(token_name(t, False).encode()),
            }
            for t, lp in alternatives(token, value, wanted)
        ]
        content.append({**ranked[0], "top_logprobs": ranked})
    return {"content": content}


async def _stream(generation: Generation, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    sampling = generation.sampling
    mark = {"system_fingerprint": fingerprint(generation.replica)}
    try:
        prompt = generation.prompts[0] if sampling.return_token_ids else None
        for index in range(sampling.n):
            first = {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
            yield sse({**head, "choices": [first], "prompt_token_ids": prompt, "prompt_text": None})
        async for delta in generation.deltas():
            chunk: dict[str, Any] = {**head, "choices": [_delta(generation, delta)]}
            if delta.finish_reason is not None and not sampling.include_usage:
                chunk |= mark
            yield sse(chunk)
        if sampling.include_usage:
            yield sse({**head, "choices": [], "usage": generation.usage(created=True, sparse=True), **mark})
    except EngineDead:
        yield sse(error_body(ENGINE_DEAD, "InternalServerError", 500))
    yield DONE


def _delta(generation: Generation, delta: Delta) -> dict[str, Any]:
    sampling = generation.sampling
    choice: dict[str, Any] = {
        "index": delta.index,
        "delta": {"content": delta.text},
        "logprobs": chat_logprobs(generation, delta.sequence, delta.start, delta.end, sampling.as_token_ids),
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = None
    choice["token_ids"] = delta.tokens if sampling.return_token_ids else None
    return choice


async def generate(replica: Replica, request: Request) -> Response:
    """Tokens in, tokens out."""
    body = parse_object(request)
    options = replica.options
    prompt = typed(body, "token_ids", list, required=True)
    if not all(type(token) is int and token >= 0 for token in prompt):
        raise invalid(["token_ids must be non-negative integers"], "body.token_ids")
    parameters = typed(body, "sampling_params", dict, required=True)
    merged = {**parameters, "stream": body.get("stream"), "stream_options": body.get("stream_options")}
    merged["cache_salt"] = body.get("cache_salt")
    max_tokens = typed(parameters, "max_tokens", int, 16)
    sampling = read_sampling(merged, options, max_tokens, typed(parameters, "logprobs", int))
    lora = find_model(replica, body.get("model"))
    limit = check_prompt(prompt, max_tokens, options)
    name = f"generate-tokens-{request_id(request, body)}"
    generation = Generation(replica, lora, sampling, [prompt], [limit], name)
    if sampling.stream:
        return event_stream(generation.during(_generate_stream(generation, name)))
    async with generation:
        await generation.finish()
        choices = [
            {
                "index": index,
                "logprobs": chat_logprobs(generation, sequence, 0, sequence.produced, True),
                "finish_reason": sequence.finish_reason,
                "token_ids": sequence.output,
                "routed_experts": None,
            }
            for index, sequence in enumerate(generation.sequences)
        ]
        return json_response(
            {
                "request_id": name,
                "model": lora.name if lora else options.model_name,
                "created": int(time.time()),
                "choices": choices,
                "usage": generation.usage(),
                "prompt_logprobs": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
            }
        )


async def _generate_stream(generation: Generation, name: str) -> AsyncGenerator[bytes, None]:
    try:
        async for delta in generation.deltas():
            choice = {
                "index": delta.index,
                "logprobs": chat_logprobs(generation, delta.sequence, delta.start, delta.end, True),
                "finish_reason": delta.finish_reason,
                "token_ids": delta.tokens,
                "routed_experts": None,
            }
            yield sse({"request_id": name, "choices": [choice], "usage": None})
        if generation.sampling.include_usage:
            yield sse({"request_id": name, "choices": [], "usage": generation.usage()})
    except EngineDead:
        yield sse(error_body(ENGINE_DEAD, "InternalServerError", 500))
    yield DONE
