"""What routing costs: microseconds for parse, decide (first of a group, its siblings), start and end; bytes a block.

    python -m benchmarks.decide [--replicas 4 64] [--sizes 100 600 8000 32000 1000000]

Bodies are as aiohttp and requests write them (`[1, 2]`) and as httpx does (`[1,2]`). Medians; single-threaded.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tracemalloc
from collections import deque
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from proxy.routing.index import Index
from proxy.routing.request import parse
from proxy.routing.router import Decision, Router

T = TypeVar("T")
STYLES = {"[1, 2]": (", ", ": "), "[1,2]": (",", ":")}
GROUP = 8


class Clock:
    """Seconds spent in each named step."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def time(self, name: str, call: Callable[[], T]) -> T:
        begin = perf_counter()
        result = call()
        self.spent.setdefault(name, []).append(perf_counter() - begin)
        return result

    def micros(self, name: str) -> float:
        return median(self.spent[name]) * 1e6 if name in self.spent else float("nan")


def body(tokens: list[int], style: tuple[str, str]) -> bytes:
    """As TRL asks for a rollout."""
    fields: dict[str, Any] = {"model": "trl-policy-v3", "prompt": tokens, "max_tokens": 64, "n": 1, "temperature": 1.0}
    fields |= {"return_token_ids": True, "logprobs": 0, "seed": 3}
    return json.dumps(fields, separators=style).encode()


def measure(replicas: int, size: int, style: tuple[str, str]) -> Clock:
    draw = random.Random(1)
    router = Router()
    for index in range(replicas):
        router.set_replica(index, key=f"http://10.0.0.{index}:8000", block_size=16, capacity_tokens=1_000_000)
    candidates = tuple(range(replicas))  # kept until a replica joins or leaves, as the fleet does
    shared = [draw.randrange(150_000) for _ in range(48)]
    answer = [draw.randrange(150_000) for _ in range(64)]
    clock, running, now = Clock(), deque[Decision](), 0.0
    for _ in range(max(3, min(150, 2_000_000 // size))):
        raw = body(shared + [draw.randrange(150_000) for _ in range(size - 48)], style)
        for member in range(GROUP):
            now += 1e-3
            request = clock.time("parse", lambda: parse("/v1/completions", raw))  # noqa: B023
            name = "sibling" if member else "first"
            decision = clock.time(name, lambda: router.decide(request, "trl-policy-v3", candidates, now))  # noqa: B023
            clock.time("start", lambda: router.start(decision, now))  # noqa: B023
            running.append(decision)
        while len(running) > 4 * replicas:
            done = running.popleft()
            clock.time("end", lambda: router.end(done, now, ok=True, output_tokens=64, output_ids=answer))  # noqa: B023
    return clock


def bytes_a_block(blocks_a_prompt: int, blocks: int = 1_000_000) -> float:
    """Memory of an index with a million blocks, as the allocator sees it."""
    draw = random.Random(1)
    tracemalloc.start()
    index = Index()
    index.set_capacity(0, None)
    shared = [draw.getrandbits(64) for _ in range(min(3, blocks_a_prompt - 1))]
    while index.blocks < blocks:
        prompt = shared + [draw.getrandbits(64) for _ in range(blocks_a_prompt - len(shared))]
        index.record("m", 1, prompt, 0.17, 0, index.walk(1, prompt))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / index.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 600, 8_000, 32_000, 1_000_000])
    options = parser.parse_args()
    steps = ("parse", "first", "sibling", "start", "end")
    table = Table("replicas", "tokens", "style", *steps, title=f"microseconds, Python {platform.python_version()}")
    for replicas in options.replicas:
        for size in options.sizes:
            for name, style in STYLES.items():
                clock = measure(replicas, size, style)
                table.add_row(str(replicas), f"{size:,}", name, *(f"{clock.micros(step):,.1f}" for step in steps))
    console = Console(width=100)
    console.print(table)
    memory = Table("blocks a prompt", "tokens a prompt (about)", "bytes a block", title="a million blocks")
    for count in (8, 39, 200):
        memory.add_row(str(count), f"{count * 16:,}", f"{bytes_a_block(count):.0f}")
    console.print(memory)


if __name__ == "__main__":
    main()
