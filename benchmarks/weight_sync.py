"""How long a new version takes from the trainer's rename to every replica, and what the fleet generates meanwhile.

    python -m benchmarks.weight_sync [--publishes 5] [--replicas 2 8 32] [--lags 0 0.5 3] [--json FILE] [--svg FILE]

`lorafleet serve` as a process in front of simulated replicas that decode rollouts. A replica sees a renamed
directory only when its mount lets it: the first after half of the lag, the last after all of it, in an order that
changes. Each sync goes as TRL's trainer does it: pause (mode keep), rename, load, resume, then unload of what is stale.
`lazy` and `eager` are the proxy's --pause; `none` loads without asking for a pause. After each load all replicas must
hold the right weights and an answer under the new name must be of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts, line
from benchmarks.picture import bars
from benchmarks.served import Served, serving
from benchmarks.weight_sync_report import AFTER_SECS, HEADINGS, MODES, Cell, panels
from proxy.simulator.adapters import read_adapter, write_adapter
from proxy.simulator.embed import SimFleet, SimReplica
from proxy.simulator.weights import expected_tokens
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint
from trainer_client import FleetClient
from trainer_client.digest import adapter_digest

SEED = 5
NAME = "bench"
STALENESS = 2
ROLLOUTS, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 1024, 64
"""Rollouts in flight for each replica, and their sizes."""

QUIET_SECS = 3.0
"""How long the undisturbed rate is taken."""

REPLICA: dict[str, Any] = {
    "prefill_tps": 12_000.0,
    "decode_tps": 20.0,
    "capacity_blocks": 4096,
    "max_loras": STALENESS + 4,
    "require_token_everywhere": True,
}


def lags(longest: float, count: int, draw: random.Random) -> list[float]:
    """One lag for each mount: evenly from half of the longest to the longest, in any order."""
    each = [longest * (0.5 + 0.5 * (index + 1) / count) for index in range(count)]
    draw.shuffle(each)
    return each


class Rig:
    """A proxy, its replicas, their load and the trainer."""

    def __init__(self, served: Served, fleet: SimFleet, root: Path) -> None:
        self.newest = 0
        self._fleet, self._root = fleet, root
        self._endpoint = Endpoint(served.url)
        self._transport = LeanTransport()
        self._client = FleetClient(served.url, api_key="")
        self._random = random.Random(SEED)

    async def close(self) -> None:
        self._client.close()
        await self._transport.close()

    def generated(self) -> int:
        """Tokens that the fleet has generated until now."""
        return sum(_generated(replica) for replica in self._fleet.replicas)

    async def rollouts(self) -> None:
        """One client after another, for ever, under the version that is the newest when it asks."""
        await asyncio.sleep(self._random.uniform(0, OUTPUT_TOKENS / REPLICA["decode_tps"]))
        while True:
            await self._ask(self.newest)

    async def _ask(self, version: int) -> None:
        """Raises AssertionError for a failure and for tokens of other weights."""
        prompt = [self._random.randrange(3, 30_000) for _ in range(PROMPT_TOKENS)]
        body = {
            "model": f"{NAME}-v{version}",
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
        }
        response = await self._transport.request(
            self._endpoint,
            "POST",
            "/v1/completions",
            headers=((b"content-type", b"application/json"),),
            body=json.dumps(body).encode(),
        )
        raw = await response.read()
        assert response.status == 200, raw
        weights = await asyncio.to_thread(read_adapter, str(self._root / f"{NAME}-v{version}"))
        assert json.loads(raw)["choices"][0]["token_ids"] == expected_tokens(weights.weights, prompt, OUTPUT_TOKENS)

    async def publish(self, cell: Cell | None = None) -> None:
        """One sync; its figures go into `cell`."""
        version = self.newest + 1
        name = f"{NAME}-v{version}"
        draft, path = self._root / f".{name}", self._root / name
        await asyncio.to_thread(write_adapter, draft, version)
        digest, weights = adapter_digest(draft), read_adapter(str(draft)).weights
        pauses = cell is not None and cell.mode != "none"
        began, before = time.perf_counter(), self.generated()
        if pauses:
            await asyncio.to_thread(self._client.pause)
        if cell is not None and cell.lag:
            for replica, lag in zip(
                self._fleet.replicas, lags(cell.lag, len(self._fleet.replicas), self._random), strict=True
            ):
                replica.faults.add("not_visible", "load", until_secs=lag)
        draft.rename(path)
        renamed = time.perf_counter()
        await asyncio.to_thread(self._client.load, name, path, digest)
        routable = time.perf_counter()
        if pauses:
            await asyncio.to_thread(self._client.resume)
        ended, after = time.perf_counter(), self.generated()
        assert all(replica.weights(name) == weights for replica in self._fleet.replicas), f"{name} is not everywhere"
        self.newest = version
        if version > STALENESS + 1:
            await asyncio.to_thread(self._client.unload, f"{NAME}-v{version - STALENESS - 1}")
        if cell is None:
            return
        await asyncio.sleep(max(0.0, ended + AFTER_SECS - time.perf_counter()))
        cell.routable.append(routable - renamed)
        cell.sync.append(ended - began)
        cell.tokens.append(after - before)
        cell.lost.append(cell.quiet * (time.perf_counter() - began) - (self.generated() - before))

    async def quiet_rate(self) -> float:
        """Tokens a second of the fleet when nothing is published."""
        began, before = time.perf_counter(), self.generated()
        await asyncio.sleep(QUIET_SECS)
        return (self.generated() - before) / (time.perf_counter() - began)


def _generated(replica: SimReplica) -> int:
    live = replica.replica.live
    # An abort of nothing brings the counters up to now: an engine that nobody watches works in long strides.
    live.engine.abort((), live.now())
    live.poke()
    return live.engine.counters.generated


@contextlib.asynccontextmanager
async def rig(count: int, mode: str, scratch: Path) -> AsyncIterator[Rig]:
    """A fleet under load, with a few versions loaded."""
    token = secrets.token_hex(16)
    root = scratch / "adapters"
    root.mkdir(parents=True)
    flags = ["--pause", "lazy" if mode == "lazy" else "eager", "--adapter-root", str(root)]
    async with SimFleet(count, api_key=token, **REPLICA) as fleet, contextlib.AsyncExitStack() as stack:
        context = serving(fleet.urls, scratch / "proxy", token, *flags)
        served = await asyncio.to_thread(context.__enter__)
        stack.callback(context.__exit__, None, None, None)
        it = Rig(served, fleet, root)
        stack.push_async_callback(it.close)
        for _ in range(STALENESS + 1):
            await it.publish()
        load = [asyncio.create_task(it.rollouts()) for _ in range(ROLLOUTS * count)]
        try:
            await asyncio.sleep(OUTPUT_TOKENS / REPLICA["decode_tps"])
            yield it
        finally:
            over = [task for task in load if task.done()]
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
        for task in over:  # none ends by itself: this raises what went wrong in it
            task.result()


async def measure(count: int, mode: str, longest: list[float], publishes: int) -> list[Cell]:
    cells = []
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as scratch:
        async with rig(count, mode, Path(scratch)) as it:
            for lag in longest:
                cell = Cell(mode, count, lag, quiet=await it.quiet_rate())
                for _ in range(publishes):
                    await it.publish(cell)
                cells.append(cell)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publishes", type=int, default=5, help="in each cell")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--lags", type=float, nargs="+", default=[0.0, 0.5, 3.0], help="seconds")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", type=Path, default=Path("out/weight_sync.json"), help="where the numbers go as well")
    parser.add_argument("--svg", type=Path, default=Path("out/weight_sync.svg"), help="where the picture goes")
    options = parser.parse_args()
    cells: list[Cell] = []
    for count in options.replicas:
        for mode in options.modes:
            cells += asyncio.run(measure(count, mode, options.lags, options.publishes))
    cells.sort(key=lambda cell: (cell.lag, cell.replicas, MODES.index(cell.mode)))
    table = Table(title=f"weight sync, {options.publishes} publishes a row, {ROLLOUTS} rollouts on each replica")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for number, cell in enumerate(cells):
        table.add_row(*cell.line(), end_section=(number + 1) % len(options.modes) == 0)
    Console(width=120).print(table)
    machine = facts("lorafleet", "httpx", "uvloop")
    print(line(machine))
    for path in (options.json, options.svg):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine, "seed": SEED, "rows": [cell.report() for cell in cells]}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    options.svg.write_text(bars("Weight sync", line(machine), panels(cells), options.modes))


if __name__ == "__main__":
    os.environ.pop("LORAFLEET_API_KEY", None)
    main()
