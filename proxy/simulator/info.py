"""The routes that tell: models, server_info, metrics, and the small ones."""

import time
from typing import Any

from proxy.simulator.admin import flag
from proxy.simulator.generation import new_id
from proxy.simulator.http import JSON_TYPE, Request, Response, invalid, json_response
from proxy.simulator.replica import Replica

_METRICS_TYPE = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")


async def health(replica: Replica, request: Request) -> Response:
    return Response(503 if replica.live.death else 200)


async def ok(replica: Replica, request: Request) -> Response:
    return Response()


async def models(replica: Replica, request: Request) -> Response:
    """The base model first, then the adapters in the order they were loaded."""
    options = replica.options
    cards = [_card(options.model_name, options.model_root, None, options.context)]
    cards += [_card(ref.name, ref.path, options.model_name, None) for ref in replica.loras.values()]
    return json_response({"object": "list", "data": cards})


def _card(name: str, root: str, parent: str | None, max_model_len: int | None) -> dict[str, Any]:
    now = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": now,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [
            {
                "id": f"modelperm-{new_id()}",
                "object": "model_permission",
                "created": now,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


async def version(replica: Replica, request: Request) -> Response:
    return json_response({"version": replica.options.version})


async def world_size(replica: Replica, request: Request) -> Response:
    include = flag(request.query(), "include_dp", True)
    return json_response({"world_size": replica.options.data_parallel_size if include else 1})


async def load(replica: Replica, request: Request) -> Response:
    return json_response({"server_load": 0})


async def server_info(replica: Replica, request: Request) -> Response:
    """The parts of vLLM's configuration that anybody looks at; the text form is no JSON inside, as vLLM's is not."""
    form = request.query().get("config_format", ["text"])[-1]
    if form not in ("text", "json"):
        message = "Input should be 'text' or 'json'"
        problem = {"type": "literal_error", "loc": ("query", "config_format"), "msg": message, "input": form}
        raise invalid([problem], "query.config_format")
    options = replica.options
    config: dict[str, Any] = {
        "model_config": {
            "model": options.model_root,
            "tokenizer": options.model_root,
            "dtype": options.dtype,
            "seed": 0,
            "max_model_len": options.context,
            "quantization": None,
            "served_model_name": options.model_name,
            "max_logprobs": options.max_logprobs,
            "logprobs_mode": "raw_logprobs",
        },
        "cache_config": {
            "block_size": options.block_size,
            "gpu_memory_utilization": 0.9,
            "cache_dtype": "auto",
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256",
            "num_gpu_blocks": options.capacity_blocks,
            "num_cpu_blocks": None,
            "kv_cache_size_tokens": options.capacity_blocks * options.block_size,
        },
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": options.data_parallel_size,
            "world_size": 1,
        },
        "scheduler_config": {
            "max_num_batched_tokens": options.max_batched_tokens,
            "max_num_seqs": options.max_num_seqs,
            "enable_chunked_prefill": True,
            "policy": "fcfs",
        },
        "lora_config": None,
        "kv_events_config": None,
    }
    if options.enable_lora:
        slots = replica.slots
        config["lora_config"] = {
            "max_lora_rank": options.max_lora_rank,
            "max_loras": options.max_loras,
            "fully_sharded_loras": False,
            "max_cpu_loras": slots.max_cpu_loras,
            "lora_dtype": options.dtype,
        }
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": options.runtime_lora, "VLLM_SERVER_DEV_MODE": options.dev_mode}
    shown: Any = config if form == "json" else f"model={options.model_root!r}, max_seq_len={options.context}"
    return json_response({"vllm_config": shown, "vllm_env": env, "system_env": {"vllm_version": options.version}})


async def metrics(replica: Replica, request: Request) -> Response:
    """Prometheus text with vLLM's names and labels."""
    options, engine = replica.options, replica.engine
    counters = engine.counters
    labels = f'engine="0",model_name="{options.model_name}"'
    lines: list[str] = []

    def metric(name: str, kind: str, help_text: str, samples: dict[str, float]) -> None:
        lines.append(f"# HELP {name} {help_text}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{{{labels_of}}} {float(value)}" for labels_of, value in samples.items())

    def plain(name: str, kind: str, help_text: str, value: float) -> None:
        metric(name, kind, help_text, {labels: value})

    running, waiting = engine.load
    plain("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", running)
    plain("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", waiting)
    usage = engine.pool.used / engine.pool.capacity
    plain("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", usage)
    plain("vllm:prefix_cache_queries_total", "counter", "Prefix cache queries, in terms of tokens.", counters.queries)
    plain("vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in terms of cached tokens.", counters.hits)
    plain("vllm:num_preemptions_total", "counter", "Cumulative number of preemptions.", counters.preemptions)
    plain("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", counters.prompt_tokens)
    plain("vllm:prompt_tokens_cached_total", "counter", "Number of cached prompt tokens.", counters.hits)
    plain("vllm:generation_tokens_total", "counter", "Number of generation tokens processed.", counters.generated)
    reasons = {reason: counters.finished.get(reason, 0) for reason in ("stop", "length", "abort", "error")}
    by_reason = {
        f'engine="0",finished_reason="{reason}",model_name="{options.model_name}"': float(count)
        for reason, count in reasons.items()
    }
    metric("vllm:request_success_total", "counter", "Count of successfully processed requests.", by_reason)
    if options.enable_lora:
        busy = ",".join(sorted({s.request.lora.name for s in engine.running if s.request.lora}))
        queued = ",".join(sorted({s.request.lora.name for s in engine.waiting if s.request.lora}))
        lora = f'max_lora="{options.max_loras}",running_lora_adapters="{busy}",waiting_lora_adapters="{queued}"'
        metric("vllm:lora_requests_info", "gauge", "Running stats on lora requests.", {lora: time.time()})
    cache = f'block_size="{options.block_size}",engine="0",num_gpu_blocks="{options.capacity_blocks}"'
    metric("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", {cache: 1.0})
    return Response(200, ("\n".join(lines) + "\n").encode(), (_METRICS_TYPE,))


async def openapi(replica: Replica, request: Request) -> Response:
    return Response(200, b'{"openapi":"3.1.0","info":{"title":"FastAPI","version":"0.1.0"},"paths":{}}', (JSON_TYPE,))
