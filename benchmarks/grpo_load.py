"""A GRPO load on two real vLLM replicas (CPU): lorafleet's prefix routing beside round robin and vllm-router.

    python -m benchmarks.grpo_load [--rounds 3] [--concurrency 32 8] [--size tiny]      needs `make real`

40 prompts of 600 tokens, eight rollouts each, two turns (the second adds 100 tokens), under a LoRA adapter. The routers
take turns within each round, over replicas whose caches were emptied. What was reused is vLLM's own count. vllm-router
knows nothing of adapters: with it, the adapter is loaded on each replica directly. Each replica has a core of its own,
as if on a machine of its own: on shared cores a router that leaves one idle makes the other twice as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.machine import all_cpu_secs
from benchmarks.offline_fleet import EndlessCache
from benchmarks.peers import Peer, lorafleet, running, vllm_router
from tests.vllm.realenv import model_directory, tail
from tests.vllm.replica import Replica, start_all
from tests.vllm.traffic import complete, prompt, session

PROMPTS, GROUP, TURNS = 40, 8, 2
LENGTH, MORE, ANSWER = 600, 100, 16
MODEL = "policy-v1"
TOKEN = "BENCHMARK_TOKEN"
COUNTERS = ("prefix_cache_hits", "prefix_cache_queries", "request_success")


@dataclass(frozen=True, slots=True)
class Run:
    """One router once. Tokens are of prompts, by vLLM's counters; `shares` are requests by replica."""

    peer: str
    concurrency: int
    seconds: float
    reused: int
    asked: int
    endless: int
    shares: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The larger share over the mean."""
        return max(self.shares) * len(self.shares) / sum(self.shares)


class Load:
    """All rollouts once, `concurrency` at a time, the siblings of a prompt right after each other."""

    def __init__(self, url: str, token: str, concurrency: int, prompts: int) -> None:
        self._url, self._token, self._concurrency = url, token, concurrency
        self._todo = deque((group, member) for group in range(prompts) for member in range(GROUP))
        self._cache = EndlessCache()
        self.endless = 0

    async def run(self) -> float:
        """The seconds that it took; an answer that is no 200 is an AssertionError."""
        async with session(self._token) as client:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._concurrency):
                    tasks.create_task(self._worker(client))
            return time.perf_counter() - began

    async def _worker(self, client: aiohttp.ClientSession) -> None:
        while self._todo:
            group, member = self._todo.popleft()
            ids = prompt(group, LENGTH)
            for turn in range(TURNS):
                if turn:
                    ids = ids + prompt(1000 * group + member, MORE)
                self.endless += self._cache.lookup(MODEL, ids)
                # No seed: on CPU, vLLM 0.27.1's engine can die of one ("CPU Generator does not use offset").
                answer = await complete(client, self._url, MODEL, ids, ANSWER, temperature=1.0)
                ids = [*ids, *answer.tokens]
                self._cache.add(MODEL, ids[:-1])


def counts(replicas: Sequence[Replica]) -> list[list[int]]:
    """The counters of each replica."""
    return [[int(replica.counter(f"vllm:{name}_total")) for name in COUNTERS] for replica in replicas]


async def load_adapter(peer: Peer, address: str, replicas: Sequence[Replica], path: Path) -> None:
    targets = [address] if peer.broadcasts else [replica.url for replica in replicas]
    headers = {"authorization": f"Bearer {replicas[0].token}"}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        for target in targets:
            fields = {"lora_name": MODEL, "lora_path": str(path)}
            (await client.post(f"{target}/v1/load_lora_adapter", json=fields)).raise_for_status()


async def measure(
    peer: Peer, replicas: Sequence[Replica], adapter: Path, concurrency: int, prompts: int = PROMPTS
) -> Run:
    """One router over replicas that are as if newly started."""
    for replica in replicas:
        replica.reset()
    token = replicas[0].token
    async with running(peer, [replica.url for replica in replicas], {TOKEN: token}) as router:
        await load_adapter(peer, router.address, replicas, adapter)
        load = Load(router.address, token, concurrency, prompts)
        before = counts(replicas)
        seconds = await load.run()
        grown = [
            [now - then for now, then in zip(*pair, strict=True)] for pair in zip(counts(replicas), before, strict=True)
        ]
    hits, queries, done = (tuple(each[at] for each in grown) for at in range(len(COUNTERS)))
    return Run(peer.name, concurrency, seconds, sum(hits), sum(queries), load.endless, done)


async def rounds(
    replicas: Sequence[Replica],
    adapter: Path,
    concurrencies: Sequence[int],
    number: int,
    keep: Callable[[list[Run]], None],
) -> list[Run]:
    """All routers in turn, and so on; a first small load warms the replicas up. `keep` gets what there is so far."""
    flags = ("--token-env", TOKEN)
    taking_part = [lorafleet("prefix", *flags), lorafleet("round_robin", *flags)]
    rust = vllm_router("cache_aware")
    taking_part += [rust] if rust else []
    await measure(taking_part[1], replicas, adapter, max(concurrencies), prompts=8)
    found: list[Run] = []
    for concurrency in concurrencies:
        for turn in range(number):
            order = taking_part[turn % len(taking_part) :] + taking_part[: turn % len(taking_part)]
            for peer in order:
                began, used = time.perf_counter(), all_cpu_secs()
                run = await measure(peer, replicas, adapter, concurrency)
                busy = (all_cpu_secs() - used) / (time.perf_counter() - began)
                print(f"{run.peer}, {concurrency} in flight: {run.seconds:.2f} s ({busy:.2f} cores busy)", flush=True)
                found.append(run)
                keep(found)
    return found


def why(log: Path) -> str:
    """What a replica said when its engine died, or else its last words."""
    found = log.read_text(errors="replace").splitlines() if log.exists() else []
    at = [number for number, line in enumerate(found) if "EngineCore" in line and "ERROR" in line]
    return "\n".join(found[at[0] : at[0] + 60]) if at else tail(log)


def lines(runs: Sequence[Run]) -> list[list[str]]:
    """A line for each number in flight and router, the head first: medians, and the least and most seconds."""
    table = [["in flight", "router", "reused", "of the possible", "largest share", "time", "to round robin"]]
    for concurrency in dict.fromkeys(run.concurrency for run in runs):
        these = [run for run in runs if run.concurrency == concurrency]
        seconds = {peer: [run.seconds for run in these if run.peer == peer] for peer in {run.peer for run in these}}
        base = statistics.median(seconds["lorafleet round_robin"])
        for peer in dict.fromkeys(run.peer for run in sorted(these, key=lambda run: run.peer)):
            mine = [run for run in these if run.peer == peer]
            middle = statistics.median(seconds[peer])
            table.append(
                [
                    str(concurrency),
                    peer,
                    f"{statistics.median(run.reused / run.asked for run in mine):.3f}",
                    f"{statistics.median(run.reused / run.endless for run in mine):.3f}",
                    f"{statistics.median(run.balance for run in mine):.2f}",
                    f"{middle:.1f} s ({min(seconds[peer]):.1f} to {max(seconds[peer]):.1f})",
                    f"{middle / base:.2f}",
                ]
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8])
    parser.add_argument(
        "--size", choices=["tiny", "mid"], default="tiny", help="of the model: 4 layers of 128, 8 of 512"
    )
    parser.add_argument("--json", type=Path, default=Path("out/grpo_load.json"))
    options = parser.parse_args()
    made = model_directory(options.size)
    about = machine.facts("lorafleet", "vllm-router") | {"vllm": "0.27.1", "model": options.size}
    options.json.parent.mkdir(parents=True, exist_ok=True)

    def keep(found: list[Run]) -> None:
        options.json.write_text(json.dumps({"machine": about, "runs": [asdict(run) for run in found]}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as scratch:
        token = secrets.token_hex(12)
        cores = os.cpu_count() or 1
        replicas = [
            Replica(Path(scratch) / f"replica{index}", made / "model", token, core=index % cores) for index in range(2)
        ]
        try:
            start_all(replicas)
            adapter = made / "adapters" / "v1"
            runs = asyncio.run(rounds(replicas, adapter, options.concurrency, options.rounds, keep))
        except BaseException:
            for replica in replicas:
                print(why(replica.log), file=sys.stderr)
            raise
        finally:
            for replica in replicas:
                replica.kill()
    table = lines(runs)
    drawn = Table(*table[0], title=machine.line(about), title_justify="left")
    for line in table[1:]:
        drawn.add_row(*line)
    Console(width=130).print(drawn)


if __name__ == "__main__":
    main()
