"""What the contract's checks do not see: exact texts and values."""

import json
from typing import Any

import httpx

from proxy.simulator import BASE, expected_logprobs, expected_tokens
from proxy.simulator.completions import alternatives
from proxy.simulator.tokenizer import decode
from tests.simulator.conftest import Start

PROMPT = list(range(40, 80))


async def test_the_whole_body(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body = {"model": "base", "prompt": PROMPT, "max_tokens": 3, "seed": 4, "logprobs": 1, "return_token_ids": True}
    answer: Any = (await http.post(f"{replica.url}/v1/completions", json={**body, "request_id": "mine"})).json()
    tokens, logprobs = expected_tokens(BASE, PROMPT, 3, seed=4), expected_logprobs(BASE, PROMPT, 3, seed=4)
    texts = [decode([token]) for token in tokens]
    assert answer.pop("created") > 0
    assert answer == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "model": "base",
        "choices": [
            {
                "index": 0,
                "text": decode(tokens),
                "logprobs": {
                    "text_offset": [0, 1, 2],
                    "token_logprobs": logprobs,
                    "tokens": texts,
                    "top_logprobs": [{text: value} for text, value in zip(texts, logprobs, strict=True)],
                },
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": tokens,
                "prompt_logprobs": None,
                "prompt_token_ids": PROMPT,
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "vllm-0.27.1-00000000",
        "usage": {
            "prompt_tokens": 40,
            "total_tokens": 43,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


async def test_choices_count_seeds_up(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 4, "n": 3, "return_token_ids": True}
    answer = (await http.post(f"{replica.url}/v1/completions", json=body)).json()
    got = [choice["token_ids"] for choice in answer["choices"]]
    assert got == [expected_tokens(BASE, PROMPT, 6, seed=seed) for seed in (4, 5, 6)]


async def test_a_stream_of_several_with_usage(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(prompt_tokens_details=False)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["ab", "cd"], "max_tokens": 3, "stream": True, "stream_options": options, "logprobs": 0}
    text = (await http.post(f"{replica.url}/v1/completions", json={**body, "return_tokens_as_token_ids": True})).text
    *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line and line != "data: [DONE]"]
    assert text.endswith("data: [DONE]\n\n")
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 0, 0, 1, 1, 1]
    assert chunks[0]["usage"] == {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
    assert chunks[0]["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
    assert last["usage"] == {"prompt_tokens": 4, "total_tokens": 10, "completion_tokens": 6}
    assert last["choices"] == [] and "system_fingerprint" in last


async def test_long_prompts(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(max_model_len=300_000, capacity_blocks=20_000)
    prompt = [7] * 200_000
    answer = await http.post(f"{replica.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == 200_000


def test_alternatives_begin_with_the_sampled_one() -> None:
    assert alternatives(50, -1.0, 0) == [(50, -1.0)]
    assert alternatives(50, -1.0, 3) == [(50, -1.0), (51, -1.5), (52, -2.0)]
