"""Loading adapters without a pause changes nothing for those who are being served."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from .proxy import Proxy
from .replica import Replica
from .traffic import Stream, prompt, session, stream

pytestmark = pytest.mark.real

REQUESTS, TOKENS = 8, 600
PROMPTS = [prompt(30 + number, 100 + 10 * number) for number in range(REQUESTS)]


async def decode(client: aiohttp.ClientSession, url: str) -> list[Stream]:
    return await asyncio.gather(*(stream(client, url, "trl-policy-v1", ids, TOKENS) for ids in PROMPTS))


def sync(proxy: Proxy, version: int, path: Path) -> None:
    """The calls of one weight sync in TRL's order."""
    assert proxy.post("/pause", mode="keep").status_code == 200
    assert proxy.get("/is_paused") == {"is_paused": True}
    assert proxy.load(f"trl-policy-v{version}", path).status_code == 200
    assert proxy.post("/resume").status_code == 200


async def test_decoding_is_bit_identical_while_versions_are_loaded(
    replicas: list[Replica], serve: Callable[..., Proxy], adapters: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy = serve("--pause", "lazy")
    pauses = [replica.log.read_text(errors="replace").count('"POST /pause') for replica in replicas]
    assert proxy.load("trl-policy-v1", adapters / "v1").status_code == 200
    async with session() as client:
        quiet = await decode(client, proxy.url)
        for replica in replicas:
            with replica.client() as admin:
                assert admin.post("/reset_prefix_cache").json() == {"success": True}
        loaded = asyncio.create_task(decode(client, proxy.url))
        async with asyncio.timeout(60):
            while sum(await asyncio.gather(*map(running, replicas))) < REQUESTS:
                await asyncio.sleep(0.02)
        for version in range(2, 7):
            await asyncio.to_thread(sync, proxy, version, adapters / f"v{version}")
        last = asyncio.get_running_loop().time()
        meanwhile = await loaded
    assert all(served.times[-1] > last for served in meanwhile), "the loads came after the decoding"
    for before, after in zip(quiet, meanwhile, strict=True):
        assert len(before.tokens) == len(before.logprobs) == TOKENS
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
    assert pauses == [replica.log.read_text(errors="replace").count('"POST /pause') for replica in replicas]
    with capsys.disabled():
        gaps = [max(served.longest_gap for served in run) for run in (quiet, meanwhile)]
        print(f"\nlongest gap between tokens: quiet {gaps[0]:.3f} s, during five lazy syncs {gaps[1]:.3f} s")


async def running(replica: Replica) -> float:
    return await asyncio.to_thread(replica.counter, "vllm:num_requests_running")
