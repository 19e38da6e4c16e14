"""What lorafleet relies on in vLLM 0.27.1, asked of a real replica with no proxy in between."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .replica import BLOCK, MAX_LORA_RANK, MAX_LORAS, Replica
from .traffic import Answer, body, complete, prompt, session

pytestmark = pytest.mark.real

PROMPT = prompt(7, 300)
FULL = (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.fixture
def replica(replicas: list[Replica]) -> Replica:
    return replicas[0]


@pytest.fixture
def load(replica: Replica, adapters: Path) -> Callable[..., httpx.Response]:
    """load(name) or load(name, path): the raw answer of /v1/load_lora_adapter."""

    def load(name: str, path: Path | None = None) -> httpx.Response:
        with replica.client() as client:
            request = {"lora_name": name, "lora_path": str(path or adapters / name)}
            return client.post("/v1/load_lora_adapter", json=request)

    return load


def post(replica: Replica, path: str, json: object = None, **query: str) -> httpx.Response:
    with replica.client() as client:
        return client.post(path, json=json, params=query)


def error(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, type and message of vLLM's error shape, whose code repeats the status."""
    shape = answer.json()["error"]
    assert shape["code"] == answer.status_code
    return answer.status_code, shape["type"], shape["message"]


async def ask(replica: Replica, model: str, **more: object) -> Answer:
    async with session(replica.token) as client:
        return await complete(client, replica.url, model, PROMPT, **more)


async def until_running(replica: Replica, wanted: int) -> None:
    async with asyncio.timeout(30):
        while await asyncio.to_thread(replica.counter, "vllm:num_requests_running") != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_answers_of_load_and_unload(replica: Replica, load: Callable[..., httpx.Response], adapters: Path) -> None:
    first = load("v1")
    assert (first.status_code, first.text) == (200, "Success: LoRA adapter 'v1' added successfully.")
    status, kind, message = error(load("v1"))
    assert (status, kind) == (400, "InvalidUserInput") and "has already been loaded" in message
    status, kind, message = error(load("absent"))
    assert (status, kind) == (404, "NotFoundError") and "No adapter found for" in message
    status, _, message = error(load("rank16"))
    assert status == 500 and "16 is greater than max_lora_rank 8" in message
    assert error(load("truncated"))[0] == 500
    assert replica.adapters() == {"v1": str(adapters / "v1")}
    assert post(replica, "/v1/unload_lora_adapter", {"lora_name": "v1"}).status_code == 200
    assert error(post(replica, "/v1/unload_lora_adapter", {"lora_name": "v1"}))[:2] == (404, "NotFoundError")
    unknown = post(replica, "/v1/completions", body("v1", PROMPT, 1))
    assert error(unknown) == (404, "NotFoundError", "The model `v1` does not exist.")


def test_key_guards_v1_and_not_health(replica: Replica) -> None:
    assert httpx.get(f"{replica.url}/v1/models").status_code == 401
    assert httpx.get(f"{replica.url}/health").status_code == 200


def test_models_and_server_info(replica: Replica, load: Callable[..., httpx.Response], adapters: Path) -> None:
    load("v2")
    with replica.client() as client:
        models: list[dict[str, Any]] = client.get("/v1/models").json()["data"]
        info: dict[str, Any] = client.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert [(m["id"], m["parent"]) for m in models] == [("base", None), ("v2", "base")]
    assert (models[0]["max_model_len"], models[1]["root"]) == (2048, str(adapters / "v2"))
    cache, lora = info["cache_config"], info["lora_config"]
    assert cache["block_size"] == BLOCK
    assert cache["num_gpu_blocks"] * BLOCK == cache["kv_cache_size_tokens"] > 100_000
    assert (lora["max_loras"], lora["max_lora_rank"]) == (MAX_LORAS, MAX_LORA_RANK)
    assert info["parallel_config"]["data_parallel_size"] == 1


async def test_prefix_cache_is_seeded_with_name_and_salt(
    replica: Replica, load: Callable[..., httpx.Response], adapters: Path
) -> None:
    load("v1")
    load("v1-again", adapters / "v1")
    first = await ask(replica, "v1")
    second = await ask(replica, "v1")
    assert (first.cached, second.cached) == (0, FULL)
    assert (second.tokens, second.logprobs) == (first.tokens, pytest.approx(first.logprobs, abs=1e-4))
    assert (await ask(replica, "v1-again")).cached == 0
    assert (await ask(replica, "base")).cached == 0
    assert (await ask(replica, "v1", cache_salt="x")).cached == 0
    assert (await ask(replica, "v1", cache_salt="x")).cached == FULL


async def test_a_reused_name_serves_the_old_weights_cache(
    replica: Replica, load: Callable[..., httpx.Response], adapters: Path
) -> None:
    load("policy", adapters / "v1")
    await ask(replica, "policy")
    post(replica, "/v1/unload_lora_adapter", {"lora_name": "policy"})
    load("policy", adapters / "v2")
    load("v2")
    stale = await ask(replica, "policy")
    right = await ask(replica, "v2")
    assert stale.cached == FULL and stale.logprobs != right.logprobs
    assert post(replica, "/reset_prefix_cache").json() == {"success": True}
    mended = await ask(replica, "policy")
    assert (mended.cached, mended.tokens, mended.logprobs) == (0, right.tokens, right.logprobs)


async def test_reset_does_nothing_while_requests_run(replica: Replica) -> None:
    await ask(replica, "base")
    running = asyncio.create_task(ask(replica, "base", tokens=1500))
    await until_running(replica, 1)
    refused = await asyncio.to_thread(post, replica, "/reset_prefix_cache")
    assert (refused.status_code, refused.json()) == (200, {"success": False})
    forced = await asyncio.to_thread(post, replica, "/reset_prefix_cache", reset_running_requests="true")
    assert forced.json() == {"success": True}
    running.cancel()
    await until_running(replica, 0)  # a client that leaves ends its request in the engine


async def test_pause_keep_empties_the_prefix_cache_and_loads_work_meanwhile(
    replica: Replica, load: Callable[..., httpx.Response]
) -> None:
    await ask(replica, "base")
    assert post(replica, "/pause", mode="keep", clear_cache="false").status_code == 200
    post(replica, "/resume")
    assert (await ask(replica, "base")).cached == FULL
    assert post(replica, "/pause", mode="keep").json() == {"status": "paused"}
    with replica.client() as client:
        assert client.get("/is_paused").json() == {"is_paused": True}
    assert load("v1").status_code == 200
    waiting = asyncio.create_task(ask(replica, "v1"))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    assert (await asyncio.to_thread(post, replica, "/resume")).json() == {"status": "resumed"}
    assert (await waiting).model == "v1"
    assert (await ask(replica, "base")).cached == 0


async def test_more_adapters_than_slots_are_listed_all_the_same(
    replica: Replica, load: Callable[..., httpx.Response]
) -> None:
    """The engine evicts without a word and reads the files again when the name is asked for."""
    names = [f"v{number}" for number in range(1, MAX_LORAS + 2)]
    assert [load(name).status_code for name in names] == [200] * len(names)
    assert sorted(replica.adapters()) == names
    answers = [await ask(replica, name, tokens=4) for name in names]
    assert len({answer.logprobs for answer in answers}) == len(names)


async def test_a_zero_adapter_answers_as_the_base_model(replica: Replica, load: Callable[..., httpx.Response]) -> None:
    load("zero")
    base, zero = await ask(replica, "base"), await ask(replica, "zero")
    assert (zero.tokens, zero.logprobs) == (base.tokens, pytest.approx(base.logprobs, abs=1e-5))
