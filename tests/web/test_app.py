"""The contract's table of requests, row by row, over simulated replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.simulator.adapters import read_adapter, write_adapter
from proxy.simulator.embed import SimFleet
from proxy.simulator.weights import expected_tokens
from tests.web.running import running

PROMPT = list(range(3, 83))


@pytest.fixture
def adapters(tmp_path: Path) -> list[Path]:
    """Four adapters with weights of their own."""
    paths = [tmp_path / "adapters" / f"trl-policy-v{n}" for n in range(1, 5)]
    for n, path in enumerate(paths, start=1):
        write_adapter(path, n)
    return paths


async def test_the_answers_of_a_single_vllm_server(tmp_path: Path, adapters: list[Path]) -> None:
    each: list[dict[str, Any]] = [{"max_loras": 6, "max_lora_rank": 16}, {"max_loras": 5, "max_lora_rank": 8}]
    async with SimFleet(each=each) as sims, running(sims.urls, tmp_path / "state") as it:
        client = it.client
        health = await client.get("/health")
        assert (health.status_code, health.json()["ready"], health.json()["total"]) == (200, 2, 2)
        assert (await it.load("trl-policy-v1", adapters[0])).text == (
            "Success: LoRA adapter 'trl-policy-v1' added successfully."
        )
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == ["base", "trl-policy-v1"]
        assert cards[0]["max_model_len"] == 32768
        assert (cards[1]["root"], cards[1]["parent"]) == (str(adapters[0]), "base")
        config = (await client.get("/server_info", params={"config_format": "json"})).json()["vllm_config"]
        assert (config["lora_config"]["max_loras"], config["lora_config"]["max_lora_rank"]) == (5, 8)
        assert config["parallel_config"]["data_parallel_size"] == 1
        assert (await client.get("/version")).json()["version"] == "0.27.1"
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/get_world_size")).json()["world_size"] == 1
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        assert (await client.post("/tokenize", json={"model": "base", "prompt": "hi"})).status_code == 200
        said = await client.post("/abort_requests", json={})
        assert said.json()["status"] == "aborted"


async def test_a_completion_says_who_answered_and_with_which_weights(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state") as it:
        await it.load("trl-policy-v1", adapters[0])
        answer = await it.complete("trl-policy-v1", PROMPT)
        weights = read_adapter(str(adapters[0])).weights
        assert answer.json()["choices"][0]["token_ids"] == expected_tokens(weights, PROMPT, 8)
        assert answer.headers["x-lorafleet-adapter"] == "trl-policy-v1"
        assert answer.headers["x-lorafleet-digest"].startswith("sha256:")
        first = answer.headers["x-lorafleet-replica"]
        again = await it.complete("trl-policy-v1", PROMPT)
        assert (again.headers["x-lorafleet-replica"], again.headers["x-lorafleet-route"]) == (first, "affinity")


async def test_a_name_is_404_in_vllms_words_until_it_is_everywhere(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state") as it:
        answer = await it.complete("trl-policy-v1", PROMPT)
        assert answer.status_code == 404
        error = {"message": "The model `trl-policy-v1` does not exist.", "type": "NotFoundError", "param": "model"}
        assert answer.json() == {"error": {**error, "code": 404}}


async def test_half_a_load_is_undone_and_each_replica_is_quoted(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state") as it:
        sims.replicas[1].faults.add("500", "load")
        answer = await it.load("trl-policy-v1", adapters[0])
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 502
        assert [(said["replica"], said["status"]) for said in error["replicas"]] == [(0, 200), (1, 500)]
        assert [dict(sim.replica.loras) for sim in sims.replicas] == [{}, {}]
        assert not any(url.removeprefix("http://") in answer.text for url in sims.urls)
        sims.replicas[1].faults.clear()
        assert (await it.load("trl-policy-v1", adapters[0])).status_code == 200


async def test_a_name_that_comes_back_with_other_weights(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state") as it:
        for path in adapters[:3]:
            assert (await it.load("policy", path)).status_code == 200
            for _ in range(3):
                answer = await it.complete("policy", PROMPT)
                weights = read_adapter(str(path)).weights
                assert answer.json()["choices"][0]["token_ids"] == expected_tokens(weights, PROMPT, 8)
                assert answer.json()["model"] == "policy"


async def test_latest_is_the_newest_committed_version(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(1) as sims, running(sims.urls, tmp_path / "state") as it:
        assert (await it.complete("trl-policy-latest", PROMPT)).status_code == 404
        for n in (1, 2):
            await it.load(f"trl-policy-v{n}", adapters[n - 1])
            answer = await it.complete("trl-policy-latest", PROMPT)
            assert answer.json()["model"] == answer.headers["x-lorafleet-adapter"] == f"trl-policy-v{n}"


async def test_more_versions_than_slots_is_409_with_the_numbers(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2, max_loras=3) as sims, running(sims.urls, tmp_path / "state") as it:
        for n in range(1, 4):
            await it.load(f"trl-policy-v{n}", adapters[n - 1])
        answer = await it.load("trl-policy-v4", adapters[3])
        assert answer.status_code == 409
        assert "max_loras=3" in answer.json()["error"]["message"]
        await it.client.post("/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v1"})
        assert (await it.load("trl-policy-v4", adapters[3])).status_code == 200


@pytest.mark.parametrize("mode", ["eager", "lazy"])
async def test_pause_and_resume(tmp_path: Path, mode: str) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state", pause=mode) as it:
        assert (await it.client.post("/pause", params={"mode": "keep"})).json() == {"status": "paused"}
        assert (await it.client.get("/is_paused")).json() == {"is_paused": True}
        assert [sim.state()["paused"] for sim in sims.replicas] == [mode == "eager"] * 2
        assert (await it.client.post("/resume")).json() == {"status": "resumed"}
        assert [sim.state()["paused"] for sim in sims.replicas] == [False] * 2


async def test_what_is_never_forwarded(tmp_path: Path) -> None:
    async with SimFleet(1) as sims, running(sims.urls, tmp_path / "state") as it:
        for path in ("/update_weights", "/collective_rpc", "/init_weight_transfer_engine"):
            answer = await it.client.post(path, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, 501)
        for path in ("/pause/", "/v1/pause", "/start_profile", "/_sim/faults"):
            assert (await it.client.post(path)).status_code == 404
        assert (await it.client.get("/pause")).status_code == 405
        assert (await it.client.get("/docs-that-nobody-has")).status_code == 404
        assert sims.replicas[0].calls.get("pause", 0) == 0


async def test_the_key_is_demanded_and_health_is_open(tmp_path: Path) -> None:
    environment = {"LORAFLEET_API_KEY": "sesame"}
    async with (
        SimFleet(1) as sims,
        running(sims.urls, tmp_path / "state", environment=environment, host="0.0.0.0") as it,
    ):
        for method, path in (("GET", "/v1/models"), ("GET", "/fleet"), ("POST", "/pause"), ("POST", "/v1/completions")):
            answer = await it.client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, 401)
        assert (await it.client.get("/health")).status_code == 200
        right = {"authorization": "Bearer sesame"}
        assert (await it.client.get("/v1/models", headers=right)).status_code == 200
        assert (await it.client.get("/v1/models", headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_page_of_another_site_may_not_pause_the_fleet(tmp_path: Path) -> None:
    async with SimFleet(1) as sims, running(sims.urls, tmp_path / "state") as it:
        answer = await it.client.post("/pause", headers={"origin": "http://evil.example"})
        assert answer.status_code == 400
        assert sims.replicas[0].calls.get("pause", 0) == 0


async def test_replicas_come_and_go(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(3) as sims, running(sims.urls[:2], tmp_path / "state") as it:
        await it.load("trl-policy-v1", adapters[0])
        added = await it.client.post("/fleet/replicas", json={"url": sims.urls[2]})
        assert (added.status_code, added.json()["index"]) == (201, 2)
        await it.ready(3)
        assert "trl-policy-v1" in sims.replicas[2].replica.loras
        assert (await it.client.post("/fleet/replicas", json={"url": sims.urls[2]})).status_code == 409
        assert (await it.client.post("/fleet/replicas", json={"url": "nonsense"})).status_code == 400
        assert (await it.client.post("/fleet/replicas/0/drain")).json()["state"] == "draining"
        assert (await it.client.delete("/fleet/replicas/0")).status_code == 200
        assert (await it.client.delete("/fleet/replicas/0")).status_code == 404
        assert (await it.client.get("/health")).json()["total"] == 2
        for seed in range(6):
            answer = await it.complete("trl-policy-v1", PROMPT[seed:])
            assert answer.headers["x-lorafleet-replica"] in ("1", "2")


async def test_metrics_of_all_with_one_dead(tmp_path: Path) -> None:
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state") as it:
        sims.replicas[1].stop()
        page = (await it.client.get("/metrics")).text
        assert 'replica="0"' in page
        assert "lorafleet_" in page
        assert "vllm:" in page


async def test_health_needs_min_ready_once_and_one_now(tmp_path: Path) -> None:
    async with SimFleet(2) as sims:
        sims.replicas[1].stop()
        async with running(sims.urls, tmp_path / "state", wait=False) as it:
            await it.ready(1)
            assert (await it.client.get("/health")).status_code == 503
            await sims.replicas[1].start()
            await it.ready(2)
            assert (await it.client.get("/health")).status_code == 200
            sims.replicas[0].stop()
            await it.ready(1)
            assert (await it.client.get("/health")).status_code == 200
            sims.replicas[1].stop()
            await it.ready(0)
            assert (await it.client.get("/health")).status_code == 503


async def test_a_new_process_knows_what_the_old_one_knew(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims:
        async with running(sims.urls, tmp_path / "state") as it:
            await it.load("trl-policy-v1", adapters[0])
            await it.load("trl-policy-v1", adapters[1])
            await it.client.post("/pause", params={"mode": "keep"})
        await sims.replicas[0].restart()
        async with running(sims.urls, tmp_path / "state") as it:
            assert (await it.client.get("/is_paused")).json() == {"is_paused": True}
            assert [sim.state()["paused"] for sim in sims.replicas] == [True, True]
            await it.client.post("/resume")
            weights = read_adapter(str(adapters[1])).weights
            for start in range(6):
                answer = await it.complete("trl-policy-v1", PROMPT[start:])
                assert answer.json()["choices"][0]["token_ids"] == expected_tokens(weights, PROMPT[start:], 8)


async def test_without_a_memory_it_adopts_what_all_replicas_hold(tmp_path: Path, adapters: list[Path]) -> None:
    async with SimFleet(2) as sims:
        async with running(sims.urls, tmp_path / "one") as it:
            await it.load("trl-policy-v1", adapters[0])
        async with running(sims.urls, tmp_path / "two") as it:
            models = (await it.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in models] == ["base", "trl-policy-v1"]
