"""What a weight sync costs those who are generating, with an eager and with a lazy pause, on real vLLM.

    python -m benchmarks.sync_gap            about six minutes on two cores; needs `make real`

Two vLLM replicas on CPU with a model of 23M parameters behind the proxy. For each mode, in one run: four requests with
600-token prompts stream while five syncs go through in TRL's order (pause, load, resume, unload), and then TRL's own
trainer makes a few steps and reports its perf/weight_sync numbers. The row `none` has no sync at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import secrets
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.vllm.proxy import Proxy, serving
from tests.vllm.realenv import model_directory
from tests.vllm.replica import Replica, start_all
from tests.vllm.traffic import Stream, prompt, session, stream
from tests.vllm.training import train

STREAMS, PROMPT_TOKENS, TOKENS, SYNCS = 4, 600, 400, 5


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds throughout; `gap` is the longest time between two events of one stream, `trl_*` are TRL's own figures."""

    mode: str
    gap: float
    gap_median: float
    sync: float | None = None
    decode: float | None = None
    trl_sync: float | None = None
    trl_pause: float | None = None
    trl_transfer: float | None = None


def sync(proxy: Proxy, version: int, path: Path) -> float:
    """One weight sync as TRL does it; the seconds from the pause to the answer of resume."""
    began = time.perf_counter()
    proxy.post("/pause", mode="keep").raise_for_status()
    proxy.load(f"bench-v{version}", path).raise_for_status()
    proxy.post("/resume").raise_for_status()
    secs = time.perf_counter() - began
    proxy.unload(f"bench-v{version - 1}") if version > 2 else None
    return secs


async def streams(proxy: Proxy, adapters: Path, syncs: int) -> tuple[list[Stream], list[float], float]:
    """The streams, what each sync took, and how long all of it took."""
    secs: list[float] = []
    async with session() as client:
        began = time.perf_counter()
        work = [
            asyncio.create_task(
                stream(client, proxy.url, "bench-v1", prompt(secrets.randbits(32), PROMPT_TOKENS), TOKENS)
            )
            for _ in range(STREAMS)
        ]
        await asyncio.sleep(3)  # past the first prefill, so that the syncs meet requests that decode
        for version in range(2, 2 + syncs):
            secs.append(await asyncio.to_thread(sync, proxy, version, adapters / f"v{version}"))
            await asyncio.sleep(0.5)
        done = await asyncio.gather(*work)
        return done, secs, time.perf_counter() - began


async def measure(mode: str, directory: Path, replicas: list[Replica], adapters: Path, steps: int) -> Row:
    """One row; the replicas are reset first and the proxy is a new one."""
    for replica in replicas:
        replica.reset()
    flags = [] if mode == "none" else ["--pause", mode]
    with serving(directory / mode, replicas, *flags) as proxy:
        proxy.load("bench-v1", adapters / "v1").raise_for_status()
        done, secs, total = await streams(proxy, adapters, 0 if mode == "none" else SYNCS)
        gaps = [b - a for s in done for a, b in zip(s.times, s.times[1:], strict=False)]
        row = Row(mode, max(gaps), statistics.median(gaps), statistics.median(secs) if secs else None, total)
        if mode == "none":
            return row
        for name in proxy.listed():
            proxy.unload(name)
        run = await train(proxy.url, directory / f"trl-{mode}", size="mid", steps=steps, staleness=2, limit_secs=550)
        trl = [statistics.median(run.values(f"perf/weight_sync_{what}")) for what in ("s", "pause_s", "transfer_s")]
        return Row(mode, row.gap, row.gap_median, row.sync, row.decode, *trl)


def show(rows: list[Row]) -> None:
    table = Table(title=f"weight sync, {STREAMS} streams of {PROMPT_TOKENS} prompt tokens, {SYNCS} syncs")
    for heading in ("pause", "longest gap", "median gap", "sync", "all streams", "TRL sync", "of it pause", "transfer"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = list(asdict(row).values())[1:]
        table.add_row(row.mode, *("" if n is None else f"{n:.3f} s" for n in numbers))
    Console(width=120).print(table)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="TRL steps in each mode")
    parser.add_argument("--json", type=Path, default=Path("out/sync_gap.json"), help="where the numbers go as well")
    arguments = parser.parse_args()
    made = model_directory("mid")
    with tempfile.TemporaryDirectory() as scratch:
        token = secrets.token_hex(12)
        replicas = [Replica(Path(scratch) / f"replica{index}", made / "model", token) for index in range(2)]
        try:
            start_all(replicas)
            rows = [
                await measure(mode, Path(scratch), replicas, made / "adapters", arguments.steps)
                for mode in ("none", "lazy", "eager")
            ]
        finally:
            for replica in replicas:
                replica.kill()
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    show(rows)
    print(f"vLLM 0.27.1, TRL 1.16.0, {time.strftime('%Y-%m-%d')}, {machine}")
    report = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "rows": [asdict(row) for row in rows]}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
