"""What a soak came to: the sums, the table's lines, and whether it passed. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import percentile, slope
from benchmarks.soak_rollouts import Tally


@dataclass(slots=True)
class Course:
    """What happened beside the completions. `samples` are (seconds, bytes resident, descriptors) of the proxy."""

    publishes: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    restarts: int = 0
    back: list[float] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    lag: float = 0.0
    cpu: float = 0.0
    rest: dict[str, Any] = field(default_factory=dict)


def at_rest(view: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, int]:
    """What should be zero when nobody asks for anything, from GET /fleet and the replicas' own states."""
    listed = {adapter["upstream"] for adapter in view["adapters"]}
    return {
        "in flight (replicas)": sum(replica["in_flight"] for replica in view["replicas"]),
        "in flight (all)": view["routing"]["in_flight"],
        "waiting": view["routing"]["waiting"],
        "under retired names": sum(adapter["in_flight"] for adapter in view["adapters"]),
        "running on replicas": sum(state["running"] + state["waiting"] for state in states),
        "replicas not ready": view["total"] - view["ready"],
        "replicas that hold other adapters": sum(set(state["adapters"]) != listed for state in states),
        "paused": int(view["paused"]),
    }


def growth(samples: list[tuple[float, int, int]], after: float) -> float:
    """Bytes of resident memory a minute, from `after` seconds on."""
    return 60 * slope([(at, rss) for at, rss, _ in samples if at >= after])


def faults(lines: list[str]) -> Counter[str]:
    """What the proxy logged as an error, by its text without numbers."""
    found = [text for text in lines if " ERROR " in text or text.startswith("Traceback") or " CRITICAL " in text]
    return Counter(re.sub(r"\d+", "N", re.sub(r"^\d\S* \S+ ", "", text)) for text in found)


def failed(report: dict[str, Any]) -> list[str]:
    """Why the run did not pass; empty when it did."""
    why = []
    for what in ("failed completions", "wrong answers", "publishes failed", "errors logged", "held at rest"):
        count = sum(report[what].values()) if isinstance(report[what], dict) else len(report[what])
        if count:
            why.append(f"{what}: {count}")
    return why


def report_of(tally: Tally, course: Course, minutes: float, log: list[str]) -> dict[str, Any]:
    """Everything that was counted, under the names that the table shows. Times are seconds."""
    warm = minutes * 60 * 0.25
    half = minutes * 60 * 0.5
    return {
        "completions answered": tally.answered,
        "of them streamed": tally.streamed,
        "of them batches": tally.batches,
        "of them under latest": tally.names["latest"],
        "tokens in them": tally.tokens,
        "failed completions": dict(tally.failed),
        "wrong answers": tally.wrong,
        "clients that left": tally.left,
        "streams cut by a kill": tally.cut,
        "publishes": len(course.publishes),
        "publishes failed": course.refused,
        "publish warnings": course.warnings,
        "sync median": percentile(course.publishes, 0.5),
        "sync longest": max(course.publishes, default=float("nan")),
        "restarts": course.restarts,
        "back median": percentile(course.back, 0.5),
        "back longest": max(course.back, default=0.0),
        "answer p50": percentile(tally.whole, 0.5),
        "answer p99": percentile(tally.whole, 0.99),
        "answer longest": max(tally.whole, default=0.0),
        "first token p50": percentile(tally.first, 0.5),
        "first token p99": percentile(tally.first, 0.99),
        "first token longest": max(tally.first, default=0.0),
        "gap p50": percentile(tally.gaps, 0.5),
        "gap p99": percentile(tally.gaps, 0.99),
        "gap longest": max(tally.gaps, default=0.0),
        "gap longest with cut streams": max([*tally.gaps, tally.gap_of_cut], default=0.0),
        "client lag longest": course.lag,
        "memory first": course.samples[0][1],
        "memory last": course.samples[-1][1],
        "memory most": max(rss for _, rss, _ in course.samples),
        "memory bytes/min": growth(course.samples, warm),
        "memory bytes/min, second half": growth(course.samples, half),
        "descriptors first": course.samples[0][2],
        "descriptors last": course.samples[-1][2],
        "descriptors most": max(count for _, _, count in course.samples),
        "descriptors/min, second half": 60 * slope([(at, count) for at, _, count in course.samples if at >= half]),
        "proxy cpu": course.cpu,
        "held at rest": course.rest,
        "errors logged": dict(faults(log)),
        "warnings logged": sum(" WARNING " in text for text in log),
        "samples": course.samples,
    }


def rows_of(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The table's lines."""

    def secs(*names: str) -> str:
        return " / ".join(f"{report[name]:.3f} s" for name in names)

    def mib(*names: str) -> str:
        return " / ".join(f"{report[name] / 2**20:.2f} MiB" for name in names)

    def counts(*names: str) -> str:
        return " / ".join(str(report[name]) for name in names)

    def listed(what: dict[str, int] | list[str]) -> str:
        counts = Counter(what)
        return str(sum(counts.values())) + "".join(f"\n{count} x {text}" for text, count in counts.items() if count)

    return [
        ("completions answered", f"{report['completions answered']:,}"),
        (
            "of them streamed / batches of 8 / under latest",
            counts("of them streamed", "of them batches", "of them under latest"),
        ),
        ("failed completions", listed(report["failed completions"])),
        ("wrong answers", listed(report["wrong answers"])),
        ("clients that left in the middle", f"{report['clients that left']:,}"),
        ("streams cut by a kill, asked again", f"{report['streams cut by a kill']:,}"),
        ("publishes / failed", f"{report['publishes']} / {listed(report['publishes failed'])}"),
        ("load on all replicas, median / longest", secs("sync median", "sync longest")),
        ("kills and restarts", str(report["restarts"])),
        ("listening again to serving, median / longest", secs("back median", "back longest")),
        ("whole answer, p50 / p99 / longest", secs("answer p50", "answer p99", "answer longest")),
        ("first token, p50 / p99 / longest", secs("first token p50", "first token p99", "first token longest")),
        ("longest gap of a stream, p50 / p99 / longest", secs("gap p50", "gap p99", "gap longest")),
        ("longest gap with cut streams", secs("gap longest with cut streams")),
        ("this client was late by up to", secs("client lag longest")),
        ("proxy memory, first / last / most", mib("memory first", "memory last", "memory most")),
        ("memory growth a minute, last 3/4 / last half", mib("memory bytes/min", "memory bytes/min, second half")),
        ("descriptors, first / last / most", counts("descriptors first", "descriptors last", "descriptors most")),
        ("descriptor growth a minute, last half", f"{report['descriptors/min, second half']:.1f}"),
        ("processor time of the proxy", f"{report['proxy cpu']:.2f} cores"),
        ("held at rest", listed(report["held at rest"])),
        ("errors in the proxy's log", listed(report["errors logged"])),
        ("warnings in the proxy's log", str(report["warnings logged"])),
    ]
