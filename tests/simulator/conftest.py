"""Replicas, adapters and the shortest way to ask one something."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.simulator import ReplicaOptions, SimReplica, write_adapter

Start = Callable[..., Awaitable[SimReplica]]
"""start(**options): a listening replica."""


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    replicas: list[SimReplica] = []

    async def start(**options: Any) -> SimReplica:
        replica = SimReplica(ReplicaOptions(**options))
        replicas.append(replica)
        await replica.start()
        return replica

    yield start
    for replica in replicas:
        assert replica.http.failures == []
        replica.close()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=20) as client:
        yield client


@pytest.fixture
def adapters(tmp_path: Path) -> Callable[[int], Path]:
    """adapters(seed): a directory with that seed's weights."""
    return lambda seed: write_adapter(tmp_path / f"seed-{seed}", seed)
