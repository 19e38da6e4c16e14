"""Every kind of fault, as a client meets it."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.simulator import BASE, SimReplica, expected_tokens, read_adapter
from tests.simulator.conftest import Start

PROMPT = list(range(40, 80))


async def complete(http: httpx.AsyncClient, replica: SimReplica, model: str = "base", **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True, **more}
    return await http.post(f"{replica.url}/v1/completions", json=body)


def ids(answer: httpx.Response) -> list[int]:
    return list(answer.json()["choices"][0]["token_ids"])


async def load(http: httpx.AsyncClient, replica: SimReplica, name: str, path: Path) -> httpx.Response:
    return await http.post(f"{replica.url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


@pytest.mark.parametrize("kind", ["reset", "lost_answer", "reset_body"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cuts(start: Start, http: httpx.AsyncClient, kind: str, stream: bool) -> None:
    replica = await start()
    replica.faults.add(kind, "stream" if stream else "completion", times=1)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await complete(http, replica, stream=stream)
    assert (await complete(http, replica)).status_code == 200
    assert not replica.replica.engine.running


async def test_a_stream_is_cut_after_so_many_chunks(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start(decode_tps=200)
    replica.faults.add("reset_body", "stream", after=3)
    chunks = []
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        async with http.stream(
            "POST", f"{replica.url}/v1/completions", json={"prompt": PROMPT, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                chunks += [line] if line else []
    assert len(chunks) == 3
    assert replica.state()["finished"] == {"abort": 1}


async def test_half_a_body(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    replica.faults.add("reset_body", "models")
    got = b""
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        async with http.stream("GET", f"{replica.url}/v1/models") as answer:
            assert answer.status_code == 200
            async for part in answer.aiter_bytes():
                got += part
    assert got.startswith(b'{"object":"list"') and not got.endswith(b"}")


@pytest.mark.parametrize(("kind", "route"), [("hang", "health"), ("stall", "models"), ("stall", "stream")])
async def test_silence_ends_with_the_client(start: Start, http: httpx.AsyncClient, kind: str, route: str) -> None:
    replica = await start()
    replica.faults.add(kind, route)
    with pytest.raises(httpx.ReadTimeout):
        if route == "stream":
            await http.post(f"{replica.url}/v1/completions", json={"prompt": PROMPT, "stream": True}, timeout=0.1)
        else:
            await http.get(f"{replica.url}/{'health' if route == 'health' else 'v1/models'}", timeout=0.1)
    async with asyncio.timeout(5):
        while replica.http.tasks:
            await asyncio.sleep(0.005)


async def test_slow_and_hang_for_a_time(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    for kind in ("slow", "hang"):
        replica.faults.add(kind, "health", times=1, secs=0.05)
        began = time.monotonic()
        assert (await http.get(f"{replica.url}/health")).status_code == 200
        assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize(("kind", "status"), [("500", 500), ("503", 503), ("error", 502)])
async def test_errors(start: Start, http: httpx.AsyncClient, kind: str, status: int) -> None:
    replica = await start()
    replica.faults.add(kind, "completion", **({"status": status} if kind == "error" else {}))
    answer = await complete(http, replica)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


async def test_garbage(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    replica.faults.add("garbage", "is_paused")
    answer = await http.get(f"{replica.url}/is_paused")
    assert answer.status_code == 200
    with pytest.raises(ValueError, match="Expecting value"):
        answer.json()


@pytest.mark.parametrize("route", ["pause", "resume", "reset", "unload"])
async def test_no_effect(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path], route: str) -> None:
    replica = await start()
    await load(http, replica, "v1", adapters(1))
    await complete(http, replica)
    replica.faults.add("no_effect", route)
    paths = {"reset": "/reset_prefix_cache", "unload": "/v1/unload_lora_adapter"}
    if route == "resume":
        await http.post(f"{replica.url}/pause", params={"mode": "keep", "clear_cache": "false"})
    answer = await http.post(replica.url + paths.get(route, f"/{route}"), json={"lora_name": "v1"})
    assert answer.status_code == 200
    state = replica.state()
    assert list(state["adapters"]) == ["v1"] and state["cache"]["cached_blocks"] > 0
    assert state["paused"] == (route == "resume")


async def test_a_load_without_effect_is_listed_and_answers_as_base(
    start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]
) -> None:
    replica = await start()
    replica.faults.add("no_effect", "load", name="v1")
    assert (await load(http, replica, "v1", adapters(1))).text == "Success: LoRA adapter 'v1' added successfully."
    assert ids(await complete(http, replica, "v1")) == expected_tokens(BASE, PROMPT, 6)
    await load(http, replica, "v2", adapters(1))
    right = read_adapter(str(adapters(1))).weights
    assert ids(await complete(http, replica, "v2")) == expected_tokens(right, PROMPT, 6)


async def test_wrong_weights(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]) -> None:
    replica = await start()
    replica.faults.add("wrong_weights", "load", path=str(adapters(2)), times=1)
    await load(http, replica, "v1", adapters(1))
    assert replica.weights("v1") == read_adapter(str(adapters(2))).weights
    replica.faults.add("wrong_weights", "load", times=1)
    await load(http, replica, "v2", adapters(1))
    assert (replica.weights("v2") or "").startswith("wrong:")


async def test_a_lost_answer_is_done(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]) -> None:
    replica = await start()
    replica.faults.add("lost_answer", "load", times=1)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await load(http, replica, "v1", adapters(1))
    assert (await load(http, replica, "v1", adapters(1))).status_code == 400
    replica.faults.add("error", "pause", effect=True)
    assert (await http.post(f"{replica.url}/pause")).status_code == 500
    assert replica.state()["paused"]


async def test_a_mount_that_lags(start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path]) -> None:
    replica = await start()
    replica.faults.add("not_visible", "load", times=2)
    answers = [await load(http, replica, "v1", adapters(1)) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [404, 404, 200]
    assert "No adapter found for" in answers[0].json()["error"]["message"]
    fault = replica.faults.add("not_visible", "load", until_secs=60)
    assert (await load(http, replica, "v3", adapters(1))).status_code == 404
    fault.until_secs = 0
    assert (await load(http, replica, "v3", adapters(1))).status_code == 200
    replica.faults.add("already_loaded", "load")
    answer = await load(http, replica, "v2", adapters(1))
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")


@pytest.mark.parametrize("kind", ["restart", "crash"])
async def test_the_process_dies(
    start: Start, http: httpx.AsyncClient, adapters: Callable[[int], Path], kind: str
) -> None:
    replica = await start(decode_tps=50)
    await load(http, replica, "v1", adapters(1))
    running = asyncio.create_task(complete(http, replica, max_tokens=1000))
    while not replica.replica.engine.running:
        await asyncio.sleep(0.001)
    replica.faults.add(kind, "load", name="poison", secs=0.01)
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await load(http, replica, "poison", adapters(2))
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await running
    if kind == "crash":
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{replica.url}/health")
        await replica.start()
    async with asyncio.timeout(5):
        while not replica.up:
            await asyncio.sleep(0.005)
    state = replica.state()
    assert (state["boots"], state["adapters"], state["running"]) == (2, {}, 0)


async def test_refuse(start: Start, http: httpx.AsyncClient) -> None:
    replica = await start()
    replica.faults.add("refuse", secs=60)
    with pytest.raises(httpx.ConnectError):
        await http.get(f"{replica.url}/health")
    await replica.start()
    assert (await http.get(f"{replica.url}/health")).status_code == 200
    replica.faults.add("refuse", secs=0.01)
    async with asyncio.timeout(5):
        while not replica.up:
            await asyncio.sleep(0.005)
    replica.faults.add("refuse", "pause")
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        await http.post(f"{replica.url}/pause")
    assert replica.state()["boots"] == 1
