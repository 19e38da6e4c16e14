"""The contract's checks on the simulator; tests/vllm runs the same ones on a real vLLM."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from proxy.simulator import SimReplica, write_adapter
from proxy.simulator.options import ReplicaOptions
from tests.simulator.contract import CHECKS, Server

MAX_LORAS = 3


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    options = ReplicaOptions(max_loras=MAX_LORAS, max_lora_rank=8, decode_tps=2000, prefill_tps=500_000)
    replica = SimReplica(options)
    await replica.start()
    adapters = [write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in range(MAX_LORAS + 2)]
    high = write_adapter(tmp_path / "high", 99, rank=16)
    yield Server(replica.url, adapters, high, tmp_path, MAX_LORAS, 8)
    assert replica.http.failures == []
    assert not replica.replica.engine.running and not replica.replica.engine.waiting
    replica.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_check(check: Callable[[Server], Awaitable[None]], server: Server) -> None:
    await check(server)
