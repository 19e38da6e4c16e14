"""Reuse, balance and time over real HTTP on simulated replicas, routers side by side in one run.

    python -m benchmarks.reuse [--sglang PYTHON] [--replicas 2 4 8 64] [--only trees] [--all] [--json FILE] [--svg FILE]

About ten minutes on two cores (`--replicas 4`: four). Routers run one after the other, each started anew over replicas
with empty caches. A cell reads: what was reused of what one endless cache would have reused, the largest replica's
share of the requests over the mean, wall time. Tokens and requests are counted by the replicas. Their clocks are sped
up (`faster` in the JSON); seconds are of this machine, and those during which other processes used more than a quarter
of a core are marked with a ?. Files are written anew after each row.

lorafleet's policies go through the same proxy. vllm-router (pip) is taken from this environment, sglang-router (pip)
from that of the python that --sglang or LORAFLEET_SGLANG_PYTHON names; it takes no token ids, so it is sent the same
prompts as text. Neither can load adapters on all replicas: for them every replica is asked itself. Other fleets than
that of four leave out least loaded and consistent hashing unless --all is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks import machine, picture, reuse_report
from benchmarks.peers import Peer, lorafleet, sglang_router, vllm_router
from benchmarks.reuse_load import Outcome, measure, merged
from benchmarks.reuse_report import Found
from benchmarks.reuse_rows import GROUPS, Row, pays, rows

FEWER = ("lorafleet least_loaded", "vllm-router consistent_hash")
"""Left out where the fleet is not of four."""
FIRST = "reused of the possible, largest share over the mean, wall time"
SECOND = (
    "time as a part of round robin's, reused of the possible; 4 replicas; decode 0.8 slower for each further request"
)


def peers(sglang: Path | None) -> list[Peer]:
    """Who takes part, lorafleet first."""
    found = [lorafleet(policy) for policy in ("prefix", "round_robin", "least_loaded")]
    found += [peer for policy in ("cache_aware", "consistent_hash") if (peer := vllm_router(policy)) is not None]
    return [*found, sglang_router(sglang)] if sglang else found


def compare(row: Row, taking_part: list[Peer], rounds: int) -> Found:
    """Every router on one row; with more rounds than one they take turns."""
    outcomes: dict[str, list[Outcome]] = {}
    for _ in range(rounds):
        for peer in taking_part:
            try:
                outcome = uvloop.run(measure(row, peer))
            except RuntimeError as problem:
                print(f"{row.name}: {problem}", file=sys.stderr)
                continue
            outcomes.setdefault(peer.name, []).append(outcome)
    found = Found(row, {name: merged(each) for name, each in outcomes.items()})
    cells = ", ".join(f"{name}: {reuse_report.cell(outcome)}" for name, outcome in found.outcomes.items())
    print(f"{row.name} ({found.fleet}): {cells}", file=sys.stderr, flush=True)
    return found


def show(title: str, table: list[list[str]]) -> None:
    drawn = Table(*table[0], title=title, title_justify="left")
    for line in table[1:]:
        drawn.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 220).print(drawn)


def facts(sglang: Path | None) -> dict[str, str]:
    found = machine.facts("lorafleet", "vllm-router")
    if sglang:
        asked = [str(sglang), "-c", "import importlib.metadata as m; print(m.version('sglang-router'))"]
        found["sglang-router"] = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return found


def write(
    options: argparse.Namespace,
    about: dict[str, str],
    names: list[str],
    quick: list[str],
    reuse: list[Found],
    times: list[Found],
) -> None:
    """JSON, Markdown and picture of what there is so far."""
    for path in (options.json, options.svg, options.markdown):
        path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "rows": [reuse_report.record(found) for found in (*reuse, *times)]}
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    tables = [reuse_report.markdown(reuse_report.lines(reuse, names, "**"))] if reuse else []
    tables += [reuse_report.markdown(reuse_report.timed(times, quick, "**"))] if times else []
    options.markdown.write_text("\n".join(tables))
    panels = reuse_report.panels([found for found in reuse if found.row.replicas == 4], times)
    versions = ", ".join(f"{name} {about[name]}" for name in about if "router" in name)
    note = f"Simulated replicas, real HTTP; {about['date']}, {about['processor']}, {about['cores']} cores, {versions}"
    options.svg.write_text(picture.bars("Routers on RL rollouts", note, panels, names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="*", choices=sorted(GROUPS), default=[4, 2, 8, 64])
    parser.add_argument("--only", default="", help="rows whose workload has this in its name")
    parser.add_argument("--all", action="store_true", help="every router on every row")
    parser.add_argument("--no-time", action="store_true", help="leave out the rows about wall time")
    parser.add_argument("--rounds", type=int, default=2, help="of the rows about wall time")
    sglang = os.environ.get("LORAFLEET_SGLANG_PYTHON")
    parser.add_argument("--sglang", type=Path, default=Path(sglang) if sglang else None, metavar="PYTHON")
    parser.add_argument("--json", type=Path, default=Path("out/reuse.json"))
    parser.add_argument("--svg", type=Path, default=Path("out/reuse.svg"))
    parser.add_argument("--markdown", type=Path, default=Path("out/reuse.md"))
    options = parser.parse_args()
    everybody = peers(options.sglang)
    fewer = everybody if options.all else [peer for peer in everybody if peer.name not in FEWER]
    quick = [peer for peer in everybody if peer.name != "vllm-router consistent_hash"]
    about = facts(options.sglang)

    names = [peer.name for peer in everybody]
    quick_names = [peer.name for peer in quick]
    reuse: list[Found] = []
    times: list[Found] = []
    for size in options.replicas:
        for row in rows(size):
            if options.only in row.name:
                reuse.append(compare(row, everybody if size == 4 else fewer, 1))
                write(options, about, names, quick_names, reuse, times)
    for row in pays():
        if options.only in row.name and not options.no_time:
            times.append(compare(row, quick, options.rounds))
            write(options, about, names, quick_names, reuse, times)
    if reuse:
        show(f"{FIRST}; {machine.line(about)}", reuse_report.lines(reuse, names))
    if times:
        show(SECOND, reuse_report.timed(times, quick_names))


if __name__ == "__main__":
    main()
