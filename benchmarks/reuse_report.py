"""What `benchmarks.reuse` shows of its outcomes: lines of tables, JSON, panels of the picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.picture import Panel
from benchmarks.reuse_load import Outcome
from benchmarks.reuse_rows import ROOMY, Row

FAIR = 1.25
"""The largest share over the mean that is still even."""
NOISE = 0.25
"""Cores that other processes may use during a cell; where they used more, its seconds are marked with a ?."""
SLOWER = 1.03
"""From how many times round robin's time on a router is called slower."""
BASELINE = "lorafleet round_robin"


@dataclass(frozen=True, slots=True)
class Found:
    """A row and what each router made of it, by name; a router that could not be started is missing."""

    row: Row
    outcomes: Mapping[str, Outcome]

    @property
    def endless(self) -> float:
        """The part of the prompt tokens that one endless cache would have reused."""
        return next(iter(self.outcomes.values())).possible

    @property
    def fleet(self) -> str:
        return f"{self.row.replicas} x {self.row.concurrency}"


def cell(outcome: Outcome | None, bold: str = "") -> str:
    """Reuse of the possible, largest share over the mean, seconds. `bold` goes around what is bad."""
    if outcome is None:
        return ""
    balance = f"{outcome.balance:.2f}"
    if outcome.balance > FAIR:
        balance = f"{bold}{balance}{bold}"
    failed = f", {bold}{outcome.failed} failed{bold}" if outcome.failed else ""
    doubt = "?" if outcome.others > NOISE else ""
    return f"{outcome.ratio:.3f}, {balance}, {outcome.wall:.1f} s{doubt}{failed}"


def lines(found: Sequence[Found], peers: Sequence[str], bold: str = "") -> list[list[str]]:
    """A line for each row, the head first."""
    head = ["workload", "fleet", "possible", *peers]
    body = [
        [each.row.name, each.fleet, f"{each.endless:.3f}", *(cell(each.outcomes.get(peer), bold) for peer in peers)]
        for each in found
    ]
    return [head, *body]


def timed(found: Sequence[Found], peers: Sequence[str], bold: str = "") -> list[list[str]]:
    """Wall time as a part of round robin's, and what was reused of the possible; the head first."""
    table = [["workload", "round robin", *(peer for peer in peers if peer != BASELINE)]]
    for each in found:
        base = each.outcomes[BASELINE]
        line = [each.row.name, f"{base.wall:.2f} s, {base.ratio:.2f}"]
        for peer in peers:
            outcome = each.outcomes.get(peer)
            if peer == BASELINE:
                continue
            if outcome is None:
                line.append("")
                continue
            part = outcome.wall / base.wall
            mark = bold if part > SLOWER else ""
            doubt = "?" if max(outcome.others, base.others) > NOISE else ""
            line.append(f"{mark}{part:.2f}{mark}{doubt}, {outcome.ratio:.2f}")
        table.append(line)
    return table


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table as Markdown."""
    head, *body = table
    rows = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body)]
    return "\n".join(rows) + "\n"


def record(found: Found) -> dict[str, Any]:
    """One row as JSON."""
    row = found.row
    fleet = {"replicas": row.replicas, "concurrency": row.concurrency, "faster": row.faster, **asdict(row.speed)}
    fleet |= {"capacity_blocks": None if row.capacity == ROOMY else row.capacity, "slow": row.slow}
    outcomes = {
        peer: {name: value for name, value in asdict(outcome).items() if name != "peer"}
        | {"ratio": round(outcome.ratio, 5), "balance": round(outcome.balance, 4)}
        for peer, outcome in found.outcomes.items()
    }
    for outcome in outcomes.values():
        for name in ("wall", "busy", "router", "others"):
            outcome[name] = round(outcome[name], 3)
        outcome["publishes"] = [round(secs, 4) for secs in outcome["publishes"]]
    return {"workload": row.name, "goal": row.workload.goal, "fleet": fleet, "peers": outcomes}


def panels(reuse: Sequence[Found], wall: Sequence[Found]) -> list[Panel]:
    """Of the rows of one fleet size, and of those about wall time."""
    found = []
    if reuse:
        size = reuse[0].row.replicas

        def part(what: str) -> dict[str, dict[str, float]]:
            return {
                each.row.name: {peer: getattr(outcome, what) for peer, outcome in each.outcomes.items()}
                for each in reuse
            }

        found += [
            Panel(f"Reused of what one endless cache would reuse, {size} replicas", part("ratio"), 1.0, digits=3),
            Panel(f"Largest replica's share over the mean (1 is even, line: {FAIR})", part("balance"), 4.0, FAIR),
        ]
    if wall:
        times = {
            each.row.name: {
                peer: outcome.wall / each.outcomes[BASELINE].wall for peer, outcome in each.outcomes.items()
            }
            for each in wall
        }
        found.append(Panel("Time as a part of round robin's, where a batch slows its replica", times, 2.0, 1.0))
    return found
