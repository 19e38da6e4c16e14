import httpx

from tests.simulator.conftest import Start


async def test_server_info_follows_the_options(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(block_size=32, capacity_blocks=10, max_loras=3, data_parallel_size=2, enable_lora=True)
    info = (await http.get(f"{replica.url}/server_info", params={"config_format": "json"})).json()
    config = info["vllm_config"]
    assert (config["cache_config"]["block_size"], config["cache_config"]["kv_cache_size_tokens"]) == (32, 320)
    assert config["parallel_config"]["data_parallel_size"] == 2
    # No request can be longer than the whole cache.
    assert config["model_config"]["max_model_len"] == 320
    assert (await http.get(f"{replica.url}/server_info", params={"config_format": "xml"})).status_code == 400
    bare = await start(enable_lora=False)
    info = (await http.get(f"{bare.url}/server_info", params={"config_format": "json"})).json()
    assert info["vllm_config"]["lora_config"] is None


async def test_small_answers(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(version="0.32.0", data_parallel_size=2)
    assert (await http.get(f"{replica.url}/version")).json() == {"version": "0.32.0"}
    assert (await http.get(f"{replica.url}/get_world_size")).json() == {"world_size": 2}
    assert (await http.get(f"{replica.url}/get_world_size", params={"include_dp": "false"})).json() == {"world_size": 1}
    assert (await http.get(f"{replica.url}/load")).json() == {"server_load": 0}
    assert (await http.get(f"{replica.url}/openapi.json")).json()["openapi"] == "3.1.0"


async def test_metrics_text(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(model_name="m")
    await http.post(f"{replica.url}/v1/completions", json={"prompt": [1] * 20, "max_tokens": 3})
    answer = await http.get(f"{replica.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    assert 'vllm:generation_tokens_total{engine="0",model_name="m"} 3.0' in lines
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0' in lines
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert all(line.startswith("#") or line.partition("{")[0] in names for line in lines)
