"""Publishing from a trainer that is not TRL's, and what the fleet makes of late, broken or too large adapters."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from trainer_client import AdapterPublisher
from trainer_client.errors import AdapterError

from .proxy import Proxy
from .replica import MAX_LORA_RANK, Replica
from .traffic import body, complete, events, prompt, session, stream

pytestmark = pytest.mark.real

PROMPT = prompt(11, 200)


@asynccontextmanager
async def answering(client: aiohttp.ClientSession, url: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    async with client.post(f"{url}/v1/completions", json=body("base", PROMPT, 1800, **request)) as response:
        yield response


async def running(replicas: list[Replica], wanted: int) -> None:
    """Waits until that many requests run in the engines, as vLLM counts them."""

    def count() -> float:
        return sum(replica.counter("vllm:num_requests_running") for replica in replicas)

    async with asyncio.timeout(30):
        while await asyncio.to_thread(count) != wanted:
            await asyncio.sleep(0.02)


def state(proxy: Proxy, replicas: list[Replica]) -> dict[str, Any]:
    """All that a change which did not happen must leave as it was."""
    fleet = proxy.fleet()
    return {
        "listed": proxy.listed(),
        "adapters": [(a["name"], a["path"], a["digest"], a["state"]) for a in fleet["adapters"]],
        "states": [member["state"] for member in fleet["replicas"]],
        "tainted": [member["tainted"] for member in fleet["replicas"]],
        "held": [replica.adapters() for replica in replicas],
    }


async def test_publish_serves_every_version_and_keeps_the_window(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path, tmp_path: Path
) -> None:
    proxy, root = serve(), tmp_path / "published"
    with AdapterPublisher(root, url=proxy.url, max_staleness=2) as publisher:
        for number in range(1, 6):
            published = await asyncio.to_thread(publisher.publish, adapters / f"v{number}")
            assert (published.name, published.loaded) == (f"trl-policy-v{number}", True)
            assert published.name in proxy.listed()
            for replica in replicas:
                assert replica.adapters()[published.name] == published.path
            async with session(replicas[0].token) as direct, session() as client:
                answers = [await complete(direct, replica.url, published.name, PROMPT) for replica in replicas]
                answers.append(await complete(client, proxy.url, published.name, PROMPT))
                base = await complete(client, proxy.url, "base", PROMPT)
            assert len({answer.tokens for answer in answers}) == 1
            assert answers[0].tokens != base.tokens
    kept = [f"trl-policy-v{number}" for number in (3, 4, 5)]
    assert sorted(proxy.listed()) == kept
    assert [sorted(replica.adapters()) for replica in replicas] == [kept, kept]
    assert sorted(path.name for path in root.glob("trl-policy-v*")) == ["trl-policy-v2", *kept]


async def test_a_stream_comes_event_by_event_and_whole(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path
) -> None:
    proxy = serve()
    assert proxy.load("trl-policy-v1", adapters / "v1").status_code == 200
    async with session() as client:
        whole = await complete(client, proxy.url, "trl-policy-v1", PROMPT, 64)
        streamed = await stream(client, proxy.url, "trl-policy-v1", PROMPT, 64)
        assert streamed.tokens == whole.tokens and len(streamed.times) >= 32
        async with answering(client, proxy.url, stream=True) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for _ in events(response):
                break  # the first event is here while the engine is at work on the others
            await running(replicas, 1)
    await running(replicas, 0)


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_ends_the_work(
    replicas: list[Replica], serve: Callable[..., Proxy], streamed: bool
) -> None:
    proxy = serve()

    async def ask(client: aiohttp.ClientSession) -> None:
        async with answering(client, proxy.url, stream=streamed) as response:
            await response.read()

    async with session() as client:
        requests = [asyncio.create_task(ask(client)) for _ in range(4)]
        await running(replicas, 4)
        for request in requests:
            request.cancel()
        await running(replicas, 0)
    async with asyncio.timeout(10):
        while any(m["in_flight"] for m in (await asyncio.to_thread(proxy.fleet))["replicas"]):
            await asyncio.sleep(0.02)


def test_an_adapter_that_no_replica_takes_leaves_all_as_it_was(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path, tmp_path: Path
) -> None:
    proxy, root = serve(), tmp_path / "published"
    assert proxy.load("trl-policy-v1", adapters / "v1").status_code == 200
    before = state(proxy, replicas)

    asked = [loads(replica) for replica in replicas]
    refused = proxy.load("trl-policy-v2", adapters / "rank16")
    error = refused.json()["error"]
    assert refused.status_code == error["code"] != 404
    reasons = {said["replica"]: said["message"] for said in error["replicas"]}
    for index, replica in enumerate(replicas):  # one that was never asked has no reason to give
        said = reasons.get(index, "")
        assert f"16 is greater than max_lora_rank {MAX_LORA_RANK}" in said or loads(replica) == asked[index]
        assert replica.url not in refused.text and str(replica.port) not in refused.text
    assert reasons
    assert state(proxy, replicas) == before

    with AdapterPublisher(root, url=proxy.url) as publisher, pytest.raises(AdapterError, match="rank"):
        publisher.publish(adapters / "rank16")
    assert [path.name for path in root.iterdir() if path.is_dir()] == []
    assert state(proxy, replicas) == before


def mount(replica: Replica, name: str) -> Path:
    """Where the replica alone sees /proc/self/cwd/mount/<name>."""
    path = replica.directory / "mount" / name
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)
    return path


def seen(name: str) -> str:
    return f"/proc/self/cwd/mount/{name}"


def loads(replica: Replica) -> int:
    """How often the replica was asked to load something, by its own log."""
    return replica.log.read_text(errors="replace").count('"POST /v1/load_lora_adapter HTTP/1.1"')


def test_an_adapter_that_one_replica_cannot_read_is_undone_on_the_other(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path
) -> None:
    proxy = serve("--load-deadline-secs", "2")
    assert proxy.load("trl-policy-v1", adapters / "v1").status_code == 200
    before = state(proxy, replicas)
    shutil.copytree(adapters / "v2", mount(replicas[0], "half"))
    shutil.copytree(adapters / "truncated", mount(replicas[1], "half"))
    refused = proxy.load("trl-policy-v2", seen("half"))
    assert refused.status_code == refused.json()["error"]["code"] != 404
    assert "error while deserializing header" in refused.text.lower()
    assert state(proxy, replicas) == before


async def test_a_mount_that_lags_on_one_replica_is_waited_for(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = serve()
    shutil.copytree(adapters / "v3", mount(replicas[0], "late"))
    late, asked = mount(replicas[1], "late"), [loads(replica) for replica in replicas]
    loading = asyncio.create_task(asyncio.to_thread(proxy.load, "trl-policy-v3", seen("late")))
    async with asyncio.timeout(30):
        while loads(replicas[1]) < asked[1] + 4:
            await asyncio.sleep(0.02)
    assert not loading.done()
    assert proxy.listed() == []
    early = await asyncio.to_thread(proxy.post, "/v1/completions", body("trl-policy-v3", PROMPT, 1))
    assert (early.status_code, early.json()["error"]["type"]) == (404, "NotFoundError")
    assert early.json()["error"]["message"] == "The model `trl-policy-v3` does not exist."

    ready = late.with_name("arriving")
    shutil.copytree(adapters / "v3", ready)
    ready.rename(late)
    appeared = asyncio.get_running_loop().time()
    assert (await loading).status_code == 200
    with capsys.disabled():
        print(
            f"\nloaded everywhere {asyncio.get_running_loop().time() - appeared:.3f} s after the last mount showed it"
        )
    assert [sorted(replica.adapters()) for replica in replicas] == [["trl-policy-v3"]] * 2
    assert loads(replicas[0]) == asked[0] + 1  # only the replica that lagged was asked again
    async with session() as client:
        assert (await complete(client, proxy.url, "trl-policy-v3", PROMPT)).model == "trl-policy-v3"
