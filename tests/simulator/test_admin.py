import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx

from proxy.simulator import expected_tokens, mixed_weights, read_adapter
from tests.simulator.conftest import Start

PROMPT = list(range(40, 80))


async def test_load_inplace_sticks(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]) -> None:
    """The directory is read again at every request; the cache still serves the old weights' blocks."""
    replica = await start()
    body = {"lora_name": "v1", "lora_path": str(adapters(1)), "load_inplace": True}
    await http.post(f"{replica.url}/v1/load_lora_adapter", json=body)

    async def ask() -> list[int]:
        body = {"model": "v1", "prompt": PROMPT, "max_tokens": 8, "return_token_ids": True}
        answer = await http.post(f"{replica.url}/v1/completions", json=body)
        return list(answer.json()["choices"][0]["token_ids"])

    one, two = (read_adapter(str(adapters(seed))).weights for seed in (1, 2))
    assert await ask() == expected_tokens(one, PROMPT, 8)
    reads = replica.state()["slots"]["reads"]
    (adapters(1) / "adapter_model.safetensors").write_bytes((adapters(2) / "adapter_model.safetensors").read_bytes())
    assert await ask() == expected_tokens(mixed_weights(two, one), PROMPT, 8)
    assert replica.state()["slots"]["reads"] == reads + 1


async def test_deleted_files_of_an_evicted_adapter_kill_the_engine(
    start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]
) -> None:
    replica = await start(max_loras=1)
    for seed in (1, 2):
        body = {"lora_name": f"v{seed}", "lora_path": str(adapters(seed))}
        await http.post(f"{replica.url}/v1/load_lora_adapter", json=body)
    (adapters(1) / "adapter_config.json").unlink()
    answer = await http.post(f"{replica.url}/v1/completions", json={"model": "v1", "prompt": PROMPT})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("EngineCore encountered an issue.")
    async with asyncio.timeout(5):
        while replica.up:
            await asyncio.sleep(0.005)


async def test_sleep_and_wake(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    assert (await http.get(f"{replica.url}/is_sleeping")).json() == {"is_sleeping": False}
    await http.post(f"{replica.url}/sleep", params={"level": "1"})
    assert (await http.get(f"{replica.url}/is_sleeping")).json() == {"is_sleeping": True}
    await http.post(f"{replica.url}/wake_up", params={"tags": "scheduling"})
    assert (await http.get(f"{replica.url}/is_sleeping")).json() == {"is_sleeping": True}
    await http.post(f"{replica.url}/wake_up")
    assert (await http.get(f"{replica.url}/is_sleeping")).json() == {"is_sleeping": False}
    await http.post(f"{replica.url}/sleep", params={"level": "0"})
    await http.post(f"{replica.url}/wake_up", params={"tags": "scheduling"})
    assert (await http.get(f"{replica.url}/is_paused")).json() == {"is_paused": False}


async def test_abort_by_external_id(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(decode_tps=50)
    body = {"prompt": PROMPT, "max_tokens": 1000, "n": 2, "request_id": "mine"}
    mine = asyncio.create_task(http.post(f"{replica.url}/v1/completions", json=body))
    while len(replica.replica.engine.running) < 2:
        await asyncio.sleep(0.001)
    nobody = await http.post(f"{replica.url}/abort_requests", json={"request_ids": ["cmpl-other"]})
    assert nobody.json() == {"status": "aborted", "aborted": 1} and not mine.done()
    await http.post(f"{replica.url}/abort_requests", json={"request_ids": ["cmpl-mine"]})
    assert [choice["finish_reason"] for choice in (await mine).json()["choices"]] == ["abort", "abort"]


async def test_dev_endpoints_accept(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    assert (await http.post(f"{replica.url}/collective_rpc", json={"method": "x"})).json() == {"results": [None]}
    assert (await http.post(f"{replica.url}/update_weights", json={})).json() == {"message": "Weights updated"}


async def test_without_lora(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]) -> None:
    replica = await start(enable_lora=False)
    body = {"lora_name": "v1", "lora_path": str(adapters(1))}
    assert (await http.post(f"{replica.url}/v1/load_lora_adapter", json=body)).status_code == 500
