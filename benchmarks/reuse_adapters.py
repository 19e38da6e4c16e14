"""Publishing adapters while a workload runs, as an asynchronous trainer does: a version is loaded while rollouts of the
older ones go on.

lorafleet is asked once and loads on every replica. The other routers know nothing of adapters, so that for them each
replica is asked itself, all at the same time.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from benchmarks.offline_workloads import Workload
from proxy.simulator.adapters import write_adapter
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint

LEAD = 64
"""How many requests before the first of a version its publish begins."""
KEEP = 3
"""Versions that stay loaded."""


class Adapters:
    """The versions that a workload names. `targets` are the addresses that get the load and unload calls."""

    def __init__(self, workload: Workload, directory: Path, targets: list[str]) -> None:
        self._first: dict[str, int] = {}
        for number, rollout in enumerate(workload.rollouts):
            self._first.setdefault(rollout.model, number)
        self._names = list(self._first)
        self._directory = directory
        self._targets = [Endpoint(target) for target in targets]
        self._transport = LeanTransport()
        self._loaded = {name: asyncio.Event() for name in self._names}
        self._begun = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._seconds: list[float] = []

    async def begin(self) -> None:
        """Write the files and publish the first version."""
        for number, name in enumerate(self._names):
            write_adapter(self._directory / name, seed=100 + number)
        self._begun = 1
        await self._publish(0)

    async def wait(self, name: str, number: int) -> None:
        """Called before request `number`: begins the publishes that are due, and waits for this request's version."""
        while self._begun < len(self._names) and number >= self._first[self._names[self._begun]] - LEAD:
            self._tasks.append(asyncio.create_task(self._publish(self._begun)))
            self._begun += 1
        await self._loaded[name].wait()

    async def end(self) -> list[float]:
        """Seconds of each publish but the first."""
        await asyncio.gather(*self._tasks)
        await self._transport.close()
        return self._seconds[1:]

    async def _publish(self, at: int) -> None:
        name, began = self._names[at], time.perf_counter()
        load = {"lora_name": name, "lora_path": str(self._directory / name), "load_inplace": False}
        await asyncio.gather(*(self._post(target, "/v1/load_lora_adapter", load) for target in self._targets))
        self._seconds.append(time.perf_counter() - began)
        self._loaded[name].set()
        if at >= KEEP:
            old = {"lora_name": self._names[at - KEEP]}
            await asyncio.gather(*(self._post(target, "/v1/unload_lora_adapter", old) for target in self._targets))

    async def _post(self, target: Endpoint, path: str, fields: dict[str, object]) -> None:
        headers = ((b"content-type", b"application/json"),)
        body = json.dumps(fields).encode()
        response = await self._transport.request(target, "POST", path, headers=headers, body=body)
        raw = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} of {fields}: {response.status} {raw!r}")
