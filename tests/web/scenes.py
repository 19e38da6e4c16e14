"""Answers of /fleet for the status page's tests: as busy as asked, the same for the same arguments."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

STATES = ("ready", "ready", "ready", "down", "ready", "joining", "ready", "suspect", "ready", "draining")


def digest(name: str) -> str:
    return "sha256:" + hashlib.sha256(name.encode()).hexdigest()


def replica(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "url": f"http://10.0.0.{index}:8000",
        "state": "ready",
        "since_secs": 512.0 + index,
        "in_flight": 0,
        "paused": False,
        "adapters": [],
        "others": [],
        "last_error": None,
        "version": "0.27.1",
        "requests": 0,
        "failures": 0,
        "tainted": {},
        "block_size": 16,
        "kv_capacity_tokens": 1_204_224,
        "max_loras": 6,
        **changes,
    }


def adapter(name: str, order: int | None, replicas: list[int], **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "path": f"/mnt/run/{name}",
        "digest": digest(name),
        "state": "committed",
        "in_flight": 0,
        "upstream": name,
        "order": order,
        "replicas": replicas,
        **changes,
    }


def transaction(number: int, kind: str, name: str | None, started: float, **changes: Any) -> dict[str, Any]:
    phases = [("queue", 0.0004), ("canary", 0.021), ("spread", 0.034), ("commit", 0.0011)]
    return {
        "id": number,
        "kind": kind,
        "name": name,
        "outcome": "committed",
        "started": started,
        "secs": sum(secs for _, secs in phases),
        "phases": [{"name": phase, "secs": secs} for phase, secs in phases],
        "error": None,
        **changes,
    }


def second(t: int, **changes: Any) -> dict[str, Any]:
    return {
        "t": t,
        **dict.fromkeys(("affinity", "spill", "new", "fallback", "prompt_tokens", "predicted", "actual"), 0),
        **dict.fromkeys(("in_flight", "waiting"), 0),
        "ready": 1,
        **changes,
    }


def fleet(
    *,
    replicas: list[dict[str, Any]],
    adapters: list[dict[str, Any]] | None = None,
    transactions: list[dict[str, Any]] | None = None,
    history: list[dict[str, Any]] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    adapters, ready = adapters or [], sum(r["state"] == "ready" for r in replicas)
    return {
        "version": "0.1.0",
        "now": 1_800_000_000.0,
        "uptime_secs": 7421.0,
        "ready": ready,
        "total": len(replicas),
        "min_ready": len(replicas),
        "healthy": ready > 0,
        "policy": "prefix",
        "pause_mode": "eager",
        "paused": False,
        "pause": None,
        "asleep": False,
        "replicas": replicas,
        "adapters": adapters,
        "slots": {"max_loras": 6, "listed": sum(a["state"] == "committed" for a in adapters)},
        "routing": {
            "decisions": {"affinity": 0, "spill": 0, "new": 0, "fallback": 0},
            "predicted_cached_tokens": 0,
            "actual_cached_tokens": 0,
            "prompt_tokens": 0,
            "blocks": 0,
            "waiting": 0,
            "in_flight": sum(r["in_flight"] for r in replicas),
        },
        "transactions": transactions or [],
        "history": history or [],
        **changes,
    }


def busy(total: int, versions: int, *, seed: int = 3, seconds: int = 600) -> dict[str, Any]:
    """A training run in full swing: publishes every 45 s, a replica that died, another that joins."""
    chance = random.Random(seed)
    names = [f"trl-policy-v{number}" for number in range(40, 40 + versions)]
    members = []
    for index in range(total):
        state = STATES[index % len(STATES)] if total > 3 else ("ready", "ready", "down")[index % 3]
        if total > 10 and index > 9 and index % 23:
            state = "ready"
        error = {"down": "connection refused (probe)", "suspect": "completion: 503 after 12.0 s"}.get(state)
        members.append(
            replica(
                index,
                state=state,
                last_error=error,
                adapters=names if state != "down" else [],
                in_flight=chance.randint(18, 34) if state == "ready" else 0,
                requests=chance.randint(48_000, 52_000),
                failures=0 if state == "ready" else chance.randint(1, 9),
            )
        )
    holders = [r["index"] for r in members if r["state"] != "down"]
    adapters = [adapter(name, order, holders) for order, name in enumerate(names)][::-1]
    for depth, bound in enumerate(adapters[:3]):
        bound["in_flight"] = (61, 22, 4)[depth]
    if adapters:
        adapters[-1]["state"] = "retiring"
    adapters.insert(0, adapter(f"trl-policy-v{40 + versions}", None, [], state="loading", digest=None, upstream=None))
    now, rows = 1_800_000_000.0, []
    for t in range(7421 - seconds, 7421):
        beat = 1 + 0.6 * math.sin(t / 37) + chance.random() * 0.5
        fresh, kept = round(3 * beat * total / 3), round(21 * beat * total / 3)
        spill = round(chance.random() * 1.7 * (1 + (t % 97 < 15)))
        prompt = (fresh + kept + spill) * 620
        row = second(t, affinity=kept, new=fresh, spill=spill, fallback=int(chance.random() < 0.04))
        row |= {"prompt_tokens": prompt, "predicted": kept * 600, "actual": round(kept * (570 + 25 * chance.random()))}
        row |= {"in_flight": round(26 * total * beat / 1.4), "ready": len(holders) - (7421 - t < 140)}
        if t % 45 == 0:
            row["marks"] = [
                {"kind": "load", "outcome": "undone" if t % 180 == 0 else "committed", "name": f"trl-policy-v{t // 45}"}
            ]
        rows.append(row)
    changes = [transaction(90, "load", f"trl-policy-v{40 + versions}", now - 0.8, outcome="running", secs=0.8)]
    changes[0]["phases"] = [{"name": "queue", "secs": 0.0003}, {"name": "canary", "secs": 0.7997}]
    for step in range(12):
        kind = ("load", "unload", "load", "pause", "resume")[step % 5]
        name = f"trl-policy-v{39 + versions - step}" if kind.endswith("load") else None
        changes.append(transaction(89 - step, kind, name, now - 40 - 45 * step))
    changes[4] |= {"outcome": "undone", "secs": 4.21, "error": "load was undone (replica 2: 500: rank 16 > max 8)"}
    decisions = {r: sum(row[r] for row in rows) for r in ("affinity", "spill", "new", "fallback")}
    return fleet(
        replicas=members,
        adapters=adapters,
        transactions=changes,
        history=rows,
        slots={"max_loras": max(6, versions + 2), "listed": max(versions - 1, 0)},
        routing={
            "decisions": decisions,
            "predicted_cached_tokens": sum(row["predicted"] for row in rows),
            "actual_cached_tokens": sum(row["actual"] for row in rows),
            "prompt_tokens": sum(row["prompt_tokens"] for row in rows),
            "blocks": 418_223,
            "waiting": 3,
            "in_flight": sum(r["in_flight"] for r in members),
        },
    )
