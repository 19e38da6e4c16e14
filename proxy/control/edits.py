"""One edit of the desired state as a line of the journal: how each is written and what it does. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxy.control.desired import Adapter, Desired, Pause
from proxy.control.roster import Roster

Line = dict[str, Any]


def _adapter_line(adapter: Adapter) -> Line:
    return {"name": adapter.name, "path": adapter.path, "digest": adapter.digest, "upstream": adapter.upstream}


def _whole_adapter_line(adapter: Adapter) -> Line:
    return {**_adapter_line(adapter), "order": adapter.order, "also": list(adapter.also)}


def _adapter(line: Line) -> Adapter:
    return Adapter(
        line["name"],
        line["path"],
        line["digest"],
        line["upstream"],
        line.get("order", 0),
        tuple(line.get("also", ())),
    )


def reserve(upstream: str, digest: str | None) -> Line:
    return {"do": "reserve", "upstream": upstream, "digest": digest}


def bind(adapter: Adapter) -> Line:
    return {"do": "bind", **_adapter_line(adapter)}


def unbind(adapter: Adapter) -> Line:
    """Take this binding away; a newer one of the name stays."""
    return {"do": "unbind", "name": adapter.name, "upstream": adapter.upstream}


def retired(upstream: str) -> Line:
    return {"do": "retired", "upstream": upstream}


def pause(value: Pause | None) -> Line:
    return (
        {"do": "pause", "query": value.query, "since": value.since, "real": value.real} if value else {"do": "resume"}
    )


def sleep(query: str | None) -> Line:
    return {"do": "sleep", "query": query}


def next_epoch(missed: Iterable[str] = ()) -> Line:
    return {"do": "next_epoch", "missed": sorted(missed)}


def met(replica: str) -> Line:
    return {"do": "met", "replica": replica}


def join(replica: str) -> Line:
    return {"do": "join", "replica": replica}


def leave(replica: str, *, named: bool) -> Line:
    return {"do": "leave", "replica": replica, "named": named}


def drain(replica: str, drained: bool) -> Line:
    return {"do": "drain" if drained else "undrain", "replica": replica}


def apply(desired: Desired, line: Line) -> Desired:
    """The edit that a line stands for. Raises KeyError or ValueError for a line that is none."""
    match line["do"]:
        case "reserve":
            return desired.reserve(line["upstream"], line["digest"])
        case "bind":
            return desired.bind(_adapter(line))
        case "unbind":
            return desired.unbind(line["name"], line["upstream"])
        case "retired":
            return desired.retired(line["upstream"])
        case "pause":
            return desired.with_pause(Pause(line["query"], line["since"], line["real"]))
        case "resume":
            return desired.with_pause(None)
        case "sleep":
            return desired.with_sleep(line["query"])
        case "next_epoch":
            return desired.next_epoch(line["missed"])
        case "met":
            return desired.with_met(line["replica"])
        case "join":
            return desired.joined(line["replica"])
        case "leave":
            return desired.left(line["replica"], line["named"])
        case "drain":
            return desired.with_drained(line["replica"], True)
        case "undrain":
            return desired.with_drained(line["replica"], False)
        case "snapshot":
            return _from_snapshot(line)
        case other:
            raise ValueError(f"unknown edit {other!r}")


def snapshot(desired: Desired) -> Line:
    """One line that stands for all edits so far."""
    return {
        "do": "snapshot",
        "version": desired.version,
        "order": desired.order,
        "cache_epoch": desired.cache_epoch,
        "adapters": [_whole_adapter_line(a) for a in desired.adapters.values()],
        "retiring": [_whole_adapter_line(a) for a in desired.retiring],
        "used": dict(desired.used),
        "pause": pause(desired.pause) if desired.pause else None,
        "asleep": desired.asleep,
        "met": sorted(desired.met),
        "added": list(desired.roster.added),
        "removed": sorted(desired.roster.removed),
        "drained": sorted(desired.roster.drained),
    }


def _from_snapshot(line: Line) -> Desired:
    held = line["pause"]
    return Desired(
        version=line["version"],
        adapters={a["name"]: _adapter(a) for a in line["adapters"]},
        retiring=tuple(_adapter(a) for a in line["retiring"]),
        used=line["used"],
        pause=Pause(held["query"], held["since"], held["real"]) if held else None,
        asleep=line["asleep"],
        cache_epoch=line["cache_epoch"],
        order=line["order"],
        met=frozenset(line["met"]),
        roster=Roster(
            tuple(line.get("added", ())), frozenset(line.get("removed", ())), frozenset(line.get("drained", ()))
        ),
    )
