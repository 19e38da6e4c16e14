"""Reuse, balance and time of each policy on simulated engines, on a virtual clock: minutes of traffic in seconds.

    python -m benchmarks.offline [--prompts 96] [--speeds gpu cpu] [--only trees] [--json out/offline.json]

Each row also says what one endless cache would reuse of the same requests, and how the time of every policy compares
with round robin's. `two` and `restart` are the reuse when requests go through two proxies that know nothing of each
other, and when the only one forgets everything half way. `gpu`: 20,000 prompt tokens a second, 60 steps a second, one
percent slower for each further sequence; `cpu`: 3,000, 30, and 80 percent.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.offline_fleet import CPU, GPU, Result, Simulation, Speed
from benchmarks.offline_workloads import Row, Workload, rows
from proxy.routing.policies import POLICIES

SPEEDS = {speed.name: speed for speed in (GPU, CPU)}
BLOCK = 16


def blocks_ever(workload: Workload) -> int:
    """About how many different blocks the workload has, answers included."""
    prompts: dict[int, int] = {}
    later = 0
    for rollout in workload.rollouts:
        prompts[id(rollout.turns[0].tokens)] = len(rollout.turns[0].tokens)
        later += sum(turn.answer for turn in rollout.turns) + sum(len(turn.tokens) for turn in rollout.turns[1:])
    distinct = len({tuple(rollout.turns[0].tokens) for rollout in workload.rollouts})
    return (distinct * max(prompts.values()) + later) // BLOCK


def simulate(row: Row, speed: Speed, policy: str, routers: int = 1, restart: bool = False) -> Result:
    tenth = blocks_ever(row.workload) // (10 * row.replicas)
    # Whatever runs must fit: a replica's part of the sequences in flight, each as long as the longest conversation.
    longest = max(sum(len(turn.tokens) + turn.answer for turn in rollout.turns) for rollout in row.workload.rollouts)
    floor = 2 * row.concurrency * longest // (row.replicas * BLOCK)
    return Simulation(
        row.workload,
        policy,
        replicas=row.replicas,
        concurrency=row.concurrency,
        speed=speed,
        speeds={0: 0.5} if row.slow else None,
        capacity_blocks=max(tenth, floor) if row.tenth else 1_000_000,
        routers=routers,
        restart_at=len(row.workload.rollouts) // 2 if restart else None,
    ).run()


def compare(number: int, prompts: int, speed: str) -> dict[str, Any]:
    """All policies on one row, and `prefix` with two proxies and with a restart."""
    row = rows(prompts)[number]
    results = {policy: simulate(row, SPEEDS[speed], policy) for policy in POLICIES}
    return {
        "workload": row.workload.name,
        "goal": row.workload.goal,
        "fleet": {"speed": speed, "replicas": row.replicas, "concurrency": row.concurrency}
        | {name: True for name in ("tenth", "slow") if getattr(row, name)},
        "policies": {
            policy: asdict(result)
            | {
                "ratio": result.ratio,
                "balance": result.balance,
                "time_to_round_robin": result.wall / results["round_robin"].wall,
            }
            for policy, result in results.items()
        },
        "two": simulate(row, SPEEDS[speed], "prefix", routers=2).ratio,
        "restart": simulate(row, SPEEDS[speed], "prefix", restart=True).ratio,
    }


def line(found: dict[str, Any]) -> list[str]:
    fleet, policies = found["fleet"], found["policies"]
    best = policies["prefix"]
    marks = [mark for mark in ("tenth", "slow") if fleet.get(mark)]
    return [
        " ".join([found["workload"], *(f"({mark})" for mark in marks)]),
        f"{fleet['speed']} {fleet['replicas']} x {fleet['concurrency']}",
        f"{best['endless'] / best['prompt_tokens']:.3f}",
        *(f"{policies[policy]['cached'] / policies[policy]['prompt_tokens']:.3f}" for policy in POLICIES),
        f"{best['ratio']:.3f}",
        f"{found['two']:.3f}",
        f"{found['restart']:.3f}",
        f"{best['balance']:.2f}",
        *(f"{policies[policy]['time_to_round_robin']:.3f}" for policy in POLICIES if policy != "round_robin"),
        str(best["routes"].get("spill", 0)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--speeds", nargs="+", choices=sorted(SPEEDS), default=["gpu", "cpu"])
    parser.add_argument("--only", default="", help="rows whose workload has this in its name")
    parser.add_argument("--json", type=Path, default=Path("out/offline.json"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    columns = ["workload", "fleet", "endless", *POLICIES, "ratio", "two", "restart", "balance"]
    columns += [f"time {policy}" for policy in POLICIES if policy != "round_robin"] + ["spills"]
    title = f"reuse, and time as a part of round robin's; Python {platform.python_version()}, {options.prompts} prompts"
    table = Table(*columns, title=title)
    wanted = [
        (number, options.prompts, speed)
        for speed in options.speeds
        for number, row in enumerate(rows(options.prompts))
        if options.only in row.workload.name
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        found = list(pool.map(compare, *zip(*wanted, strict=True))) if wanted else []
    for row in found:
        table.add_row(*line(row))
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
