"""POST /v1/completions, as ``vllm/entrypoints/openai/completion`` answers it."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from proxy.simulator.engine import EngineDead
from proxy.simulator.generation import Delta, Generation, request_id
from proxy.simulator.http import (
    Request,
    Response,
    bad_request,
    error_body,
    event_stream,
    json_response,
    parse_object,
    sse,
    typed,
)
from proxy.simulator.replica import ENGINE_DEAD, Replica
from proxy.simulator.sampling import check_prompt, find_model, read_prompts, read_sampling, token_ids
from proxy.simulator.sequence import Sequence
from proxy.simulator.tokenizer import decode, token_text

DONE = b"data: [DONE]\n\n"


async def completions(replica: Replica, request: Request) -> Response:
    body = parse_object(request)
    options = replica.options
    prompts = read_prompts(body)
    max_tokens = typed(body, "max_tokens", int, 16)
    sampling = read_sampling(body, options, max_tokens, typed(body, "logprobs", int))
    lora = find_model(replica, body.get("model"))
    if not prompts:
        raise bad_request("You must pass at least one prompt")
    ids = [token_ids(prompt) for prompt in prompts]
    limits = [check_prompt(prompt, max_tokens, options) for prompt in ids]
    name = f"cmpl-{request_id(request, body)}"
    generation = Generation(replica, lora, sampling, ids, limits, name)
    head = {
        "id": name,
        "object": "text_completion",
        "created": int(time.time()),
        "model": lora.name if lora else options.model_name,
    }
    if sampling.stream:
        return event_stream(generation.during(_stream(generation, head)))
    async with generation:
        await generation.finish()
        return json_response(
            {
                **head,
                "choices": [_choice(generation, index) for index in range(len(generation.sequences))],
                "service_tier": None,
                "system_fingerprint": fingerprint(replica),
                "usage": generation.usage(),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )


def fingerprint(replica: Replica) -> str:
    return f"vllm-{replica.options.version}-00000000"


def _choice(generation: Generation, index: int) -> dict[str, Any]:
    sequence, sampling = generation.sequences[index], generation.sampling
    output = sequence.output
    return {
        "index": index,
        "text": decode(output),
        "logprobs": None if sampling.logprobs is None else _logprobs(generation, sequence, 0, sequence.produced, 0),
        "finish_reason": sequence.finish_reason,
        "stop_reason": None,
        "token_ids": output if sampling.return_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": generation.prompts[index // sampling.n] if sampling.return_token_ids else None,
        "routed_experts": None,
    }


def token_name(token: int, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else token_text(token)


def alternatives(token: int, logprob: float, count: int) -> list[tuple[int, float]]:
    """The sampled token and what came after it: ``count`` in all, at least the sampled one."""
    return [(token + rank, logprob - rank / 2) for rank in range(max(1, count))]


def _logprobs(generation: Generation, sequence: Sequence, start: int, end: int, offset: int) -> dict[str, Any]:
    """OpenAI's legacy shape; ``offset``: characters before the first token."""
    sampling = generation.sampling
    tokens, values = sequence.tokens(start, end), sequence.logprobs(start, end)
    names = [token_name(token, sampling.as_token_ids) for token in tokens]
    offsets = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": names,
        "top_logprobs": [
            {token_name(t, sampling.as_token_ids): lp for t, lp in alternatives(token, value, sampling.logprobs or 0)}
            for token, value in zip(tokens, values, strict=True)
        ],
    }


async def _stream(generation: Generation, head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    sampling = generation.sampling
    mark = {"system_fingerprint": fingerprint(generation.replica)}
    cached: int | None = None
    try:
        async for delta in generation.deltas():
            if cached is None:
                cached = delta.sequence.cached_tokens
            chunk: dict[str, Any] = {**head, "choices": [_delta(generation, delta)]}
            if sampling.continuous_usage:
                prompt = len(delta.sequence.request.prompt)
                chunk["usage"] = {
                    "prompt_tokens": prompt,
                    "total_tokens": prompt + delta.end,
                    "completion_tokens": delta.end,
                }
            if delta.finish_reason is not None and not sampling.include_usage:
                chunk |= mark
            yield sse(chunk)
        if sampling.include_usage:
            yield sse({**head, "choices": [], "usage": generation.usage(sparse=True, cached=cached), **mark})
    except EngineDead:
        yield sse(error_body(ENGINE_DEAD, "InternalServerError", 500))
    yield DONE


def _delta(generation: Generation, delta: Delta) -> dict[str, Any]:
    sampling = generation.sampling
    first = delta.start == 0 and sampling.return_token_ids
    return {
        "index": delta.index,
        "text": delta.text,
        "logprobs": None
        if sampling.logprobs is None
        else _logprobs(generation, delta.sequence, delta.start, delta.end, delta.start),
        "finish_reason": delta.finish_reason,
        "stop_reason": None,
        "prompt_token_ids": list(delta.sequence.request.prompt) if first else None,
        "token_ids": delta.tokens if sampling.return_token_ids else None,
    }
