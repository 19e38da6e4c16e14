"""What one server answers to a batch, and what others answer to its parts: bodies and events, made to order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


def dumps(value: Any) -> bytes:
    """As vLLM writes JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def choice(prompt: int, sample: int, index: int, text: str) -> dict[str, Any]:
    """Depends on the prompt and the sample alone, but for its index."""
    ids = [prompt, sample, 7]
    return {
        "index": index,
        "text": text,
        "logprobs": {"tokens": [text], "token_logprobs": [-0.25 * prompt - 1e-7 * sample], "top_logprobs": [{text: 0}]},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "prompt_logprobs": [None, {"3": {"logprob": -1.5, "rank": 1, "decoded_token": '{"index":0'}}],
        "prompt_token_ids": ids * 2,
    }


def usage(prompts: Sequence[int], n: int, told: int) -> dict[str, Any]:
    """`told` is the prompt whose cached tokens are told."""
    prompt, completion = sum(10 + each for each in prompts), sum(3 + each for each in prompts) * n
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": 16 * told, "created_cache_tokens": None},
    }


def answer(prompts: Sequence[int], n: int, text: str, name: str = "cmpl-a", created: int = 1) -> bytes:
    """What one server answers to these prompts, which are numbers here."""
    choices = [
        choice(prompt, sample, at * n + sample, text) for at, prompt in enumerate(prompts) for sample in range(n)
    ]
    return dumps(
        {
            "id": name,
            "object": "text_completion",
            "created": created,
            "model": "m",
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "vllm-0.27.1-1",
            "usage": usage(prompts, n, prompts[-1]),
            "kv_transfer_params": {"of": prompts[0]},
            "metrics": None if len(prompts) > 1 or n > 1 else {"time_to_first_token_ms": 3.5},
        }
    )


@st.composite
def divisions(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """(prompts, answers to each, the positions of each part)."""
    count = draw(st.integers(2, 9))
    owners = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    parts = [[position for position, owner in enumerate(owners) if owner == part] for part in range(4)]
    return count, draw(st.integers(1, 3)), draw(st.permutations([part for part in parts if part]))


texts = st.text(st.characters(codec="utf-8"), max_size=12) | st.just('"choices":[{"index":0,\n\ndata: [DONE]\n\n')
