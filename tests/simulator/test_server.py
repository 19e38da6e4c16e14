"""Routes, keys, records and the simulator's own endpoints."""

import httpx
import pytest

from proxy.simulator import SimReplica
from proxy.simulator.server import ROUTES
from tests.simulator.conftest import Start

KEY = {"authorization": "Bearer secret"}


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}])
async def test_the_key_guards_what_vllm_guards(start: Start, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
    replica = await start(api_key="secret")
    refused = await http.get(f"{replica.url}/v1/models", headers=headers)
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert (await http.post(f"{replica.url}/inference/v1/generate", headers=headers)).status_code == 401
    assert (await http.get(f"{replica.url}/health", headers=headers)).status_code == 200
    assert (await http.post(f"{replica.url}/pause", headers=headers)).status_code == 200
    assert (await http.get(f"{replica.url}/v1/models", headers=KEY)).status_code == 200


async def test_a_gateway_guards_everything_but_our_own(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(api_key="secret", require_token_everywhere=True)
    for path in ("/health", "/is_paused", "/metrics", "/nowhere"):
        assert (await http.get(replica.url + path)).status_code == 401
    assert (await http.get(f"{replica.url}/health", headers=KEY)).status_code == 200
    state = (await http.get(f"{replica.url}/_sim/state")).json()
    assert state["headers"]["health"]["authorization"] == "Bearer secret"
    assert (state["calls"]["health"], state["calls"]["nowhere"]) == (2, 1)


async def test_unknown_paths_and_methods(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    answer = await http.get(f"{replica.url}/nowhere")
    assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    answer = await http.get(f"{replica.url}/pause")
    assert (answer.status_code, answer.json(), answer.headers["allow"]) == (
        405,
        {"detail": "Method Not Allowed"},
        "POST",
    )


async def test_modes_that_are_off(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(dev_mode=False, runtime_lora=False)
    for path in ("/pause", "/v1/load_lora_adapter", "/reset_prefix_cache"):
        assert (await http.post(replica.url + path)).status_code == 404
    assert (await http.get(f"{replica.url}/server_info")).status_code == 404


async def test_every_route_answers(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    for path, route in ROUTES.items():
        answer = await http.request(route.methods[0], replica.url + path)
        assert answer.status_code in (200, 400), path


async def test_faults_over_http(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    url = f"{replica.url}/_sim/faults"
    added = await http.post(
        url, json=[{"kind": "503", "route": "health"}, {"kind": "500", "route": "load", "times": 2}]
    )
    assert [fault["route"] for fault in added.json()["faults"]] == ["health", "load"]
    assert (await http.get(f"{replica.url}/health")).status_code == 503
    assert (await http.get(url)).json()["faults"][0]["hits"] == 1
    assert len((await http.delete(url, params={"route": "health"})).json()["faults"]) == 1
    assert (await http.get(f"{replica.url}/health")).status_code == 200
    assert (await http.delete(url)).json() == {"faults": []}
    assert (await http.post(url, json={"kind": "nonsense"})).status_code == 400
    assert (await http.get(f"{replica.url}/_sim/other")).status_code == 404


async def test_refusing_over_http_comes_after_the_answer(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    answer = await http.post(f"{replica.url}/_sim/faults", json={"kind": "refuse", "secs": 60})
    assert answer.status_code == 200
    await until_down(replica)


async def until_down(replica: SimReplica) -> None:
    import asyncio

    async with asyncio.timeout(5):
        while replica.up:
            await asyncio.sleep(0.005)


async def test_the_app_runs_on_any_asgi_server(start: Start) -> None:
    replica = await start()
    transport = httpx.ASGITransport(replica.http.app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://sim") as client:
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "base"
        answer = await client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
