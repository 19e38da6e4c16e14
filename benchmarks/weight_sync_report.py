"""What the syncs of one fleet under one lag came to: a line of the table, JSON, bars of the picture. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.figures import scale
from benchmarks.picture import Panel

MODES = ("none", "lazy", "eager")
AFTER_SECS = 1.0
"""How long after a sync its cost is counted."""


@dataclass(slots=True)
class Cell:
    """One row: seconds, and tokens of the whole fleet. `lost` is what an undisturbed fleet would have generated more in
    the time of a sync and AFTER_SECS after it."""

    mode: str
    replicas: int
    lag: float
    quiet: float = 0.0
    routable: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second while it synced."""
        return sum(self.tokens) / max(1e-9, sum(self.sync))

    def share(self) -> str:
        """The rate while it synced, of the quiet one; nothing for syncs too short to tell."""
        return f"{100 * self.rate / self.quiet:.0f} %" if sum(self.sync) >= 1.0 else ""

    def report(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "replicas": self.replicas,
            "lag": self.lag,
            "routable_secs": self.routable,
            "sync_secs": self.sync,
            "tokens": self.tokens,
            "quiet_tokens_per_sec": self.quiet,
            "sync_tokens_per_sec": self.rate,
            "lost_tokens": self.lost,
        }

    def line(self) -> list[str]:
        return [
            f"{self.lag:g} s",
            str(self.replicas),
            self.mode,
            f"{median(self.routable):.3f} s",
            f"{max(self.routable):.3f} s",
            f"{median(self.routable) - self.lag:.3f} s",
            f"{median(self.sync):.3f} s",
            f"{median(self.tokens):,.0f}",
            self.share(),
            f"{max(0.0, median(self.lost)):,.0f}",
        ]


HEADINGS = (
    "mounts lag",
    "replicas",
    "pause",
    "to routable, median",
    "longest",
    "median beyond the lag",
    "whole sync",
    "tokens meanwhile",
    "of the quiet rate",
    "lost",
)


def panels(cells: list[Cell]) -> list[Panel]:
    """The picture: when a version can be asked for, and what its sync costs."""
    routable: dict[str, dict[str, float]] = {}
    lost: dict[str, dict[str, float]] = {}
    for cell in cells:
        label = f"{cell.lag:g} s, {cell.replicas}"
        routable.setdefault(label, {})[cell.mode] = median(cell.routable)
        lost.setdefault(label, {})[cell.mode] = max(0.0, median(cell.lost)) / cell.replicas

    def top(groups: dict[str, dict[str, float]]) -> float:
        return scale(max(value for each in groups.values() for value in each.values()))

    return [
        Panel(
            "seconds from rename to routable on all (median), by lag of the mounts and replicas",
            routable,
            top(routable),
        ),
        Panel("tokens not generated because of it, for each replica (median)", lost, top(lost), digits=0),
    ]
