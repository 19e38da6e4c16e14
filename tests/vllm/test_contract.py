"""What lorafleet relies on in vLLM 0.27.1, asked of a real replica with no proxy in between.

The checks are those that hold the simulator to the same facts; a few that only the real thing can answer come on top.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.simulator.contract import CHECKS, Server

from .replica import BLOCK, MAX_LORA_RANK, MAX_LORAS, Replica
from .traffic import complete, endless_cache, prompt, session

pytestmark = pytest.mark.real


@pytest.fixture
def server(replicas: list[Replica], adapters: Path, tmp_path: Path) -> Server:
    return Server(
        base_url=replicas[0].url,
        adapters=[adapters / f"v{number}" for number in range(1, 9)],
        high_rank=adapters / "rank16",
        scratch=tmp_path,
        max_loras=MAX_LORAS,
        max_lora_rank=MAX_LORA_RANK,
        headers={"authorization": f"Bearer {replicas[0].token}"},
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_check(check: Callable[[Server], Awaitable[None]], server: Server) -> None:
    await check(server)


def test_the_key_guards_v1_only(replicas: list[Replica]) -> None:
    """So a caller who gets past the proxy could still pause an engine: see the proxy's own key."""
    assert httpx.get(f"{replicas[0].url}/v1/models").status_code == 401
    for path in ("/health", "/server_info", "/is_paused", "/metrics"):
        assert httpx.get(f"{replicas[0].url}{path}").status_code == 200


async def test_an_adapter_whose_b_is_zero_answers_as_the_base_model(replicas: list[Replica], adapters: Path) -> None:
    replica, ids = replicas[0], prompt(7, 300)
    with replica.client() as client:
        request = {"lora_name": "zero", "lora_path": str(adapters / "zero")}
        client.post("/v1/load_lora_adapter", json=request).raise_for_status()
    async with session(replica.token) as client:
        base, zero = [await complete(client, replica.url, model, ids) for model in ("base", "zero")]
    assert (zero.tokens, zero.logprobs) == (base.tokens, pytest.approx(base.logprobs, abs=1e-5))


async def test_the_endless_cache_counts_as_vllm_does(replicas: list[Replica]) -> None:
    """Lengths around a block's end, prompts that share a part, and the whole prompt again."""
    replica, long = replicas[0], prompt(8, 10 * BLOCK)
    prompts = [long[:length] for length in (5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK, 5 * BLOCK + 1, 10 * BLOCK, 3 * BLOCK)]
    async with session(replica.token) as client:
        cached = [(await complete(client, replica.url, "base", ids, tokens=1)).cached for ids in prompts]
    assert cached == [endless_cache(prompts[: n + 1]) - endless_cache(prompts[:n]) for n in range(len(prompts))]
