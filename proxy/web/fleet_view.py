"""The JSON of GET /fleet: everything an operator may see, and nothing that is a secret. Pure.

Texts that come from elsewhere (errors of replicas, reasons) are shortened, and tokens and passwords in URLs are struck
out of them. Names come from clients and are passed on as they are: whoever shows them must show them as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from proxy.control.desired import Adapter, Pause
from proxy.control.records import TransactionRecord
from proxy.replica_state import State
from proxy.web.history import ROUTES, Reading

if TYPE_CHECKING:
    from proxy.fleet import Fleet, Replica

MAX_TRANSACTIONS = 50
MAX_TEXT = 600
_USERINFO = re.compile(r"(?<=://)[^/\s@]*+@")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the view repeats of the configuration. `pause_lease_secs` of 0 means that a pause has no end. `follows`: a
    dns:// name may bring replicas that nobody has heard of yet."""

    version: str
    policy: str
    pause_mode: str
    min_ready: int
    pause_lease_secs: float = 0.0
    follows: bool = False


def is_healthy(fleet: Fleet, min_ready: int, *, follows: bool = False) -> bool:
    """The rule of /health: `min_ready` replicas have been ready once, and at least one is now. Nobody waits for
    replicas that were removed or drained before."""
    serving = [replica for replica in fleet.members() if replica.state is not State.DRAINING]
    wanted = min_ready if follows else min(min_ready, len(serving))
    return len(fleet.ready_once) >= wanted and bool(fleet.ready())


def fleet_view(
    fleet: Fleet,
    settings: Settings,
    reading: Reading,
    *,
    transactions: Iterable[TransactionRecord] = (),
    history: Sequence[dict[str, Any]] = (),
    started: float,
    wall: float,
) -> dict[str, Any]:
    """Build the view. `transactions` in any order; `history` as `History.rows` gives it.

    `started` is when the proxy started, on the fleet's clock; `wall` is now in seconds since 1970. The keys are the
    contract with the page and with scripts; times are seconds.
    """
    now = fleet.clock()
    members, ready = fleet.members(), fleet.ready()
    clean = _Cleaner(members)
    pause = fleet.desired.pause
    names = {a.upstream: a.name for a in (*fleet.desired.retiring, *fleet.desired.adapters.values())}
    records = sorted(transactions, key=lambda record: -record.id)[:MAX_TRANSACTIONS]
    return {
        "version": settings.version,
        "now": round(wall, 3),
        "uptime_secs": round(now - started, 3),
        "ready": len(ready),
        "total": len(members),
        "min_ready": settings.min_ready,
        "healthy": is_healthy(fleet, settings.min_ready, follows=settings.follows),
        "policy": settings.policy,
        "pause_mode": settings.pause_mode,
        "paused": pause is not None,
        "pause": _pause(pause, settings.pause_lease_secs, wall) if pause is not None else None,
        "asleep": fleet.desired.asleep is not None,
        "replicas": [_replica(replica, names, now, clean) for replica in members],
        "adapters": _adapters(fleet, members, records),
        "slots": {"max_loras": _max_loras(members), "listed": len(fleet.desired.adapters)},
        "routing": {
            "decisions": dict(zip(ROUTES, reading.routes, strict=True)),
            "predicted_cached_tokens": reading.predicted,
            "actual_cached_tokens": reading.actual,
            "prompt_tokens": reading.prompt_tokens,
            "blocks": reading.blocks,
            "waiting": reading.waiting,
            "in_flight": reading.in_flight,
        },
        "transactions": [_transaction(record, wall, clean) for record in records],
        "history": list(history),
    }


class _Cleaner:
    """Makes foreign text fit to be shown."""

    def __init__(self, members: Iterable[Replica]) -> None:
        self._tokens = {token for replica in members if (token := _token(replica))}

    def __call__(self, text: str | None) -> str | None:
        if text is None:
            return None
        for token in self._tokens:
            text = text.replace(token, "***")
        text = _USERINFO.sub("", text)
        return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _token(replica: Replica) -> str | None:
    try:
        return replica.endpoint.token()
    except Exception:  # an unreadable token file is no reason to show nothing
        return None


def shown_url(base: str) -> str:
    """A replica's address without user, password, query and fragment."""
    try:
        parts = urlsplit(base)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    except ValueError:
        return "(unreadable URL)"


def _pause(pause: Pause, lease_secs: float, wall: float) -> dict[str, Any]:
    return {
        "mode": parse_qs(pause.query).get("mode", ["abort"])[0],
        "lazy": not pause.real,
        "age_secs": round(max(wall - pause.since, 0.0), 3),
        "lease_secs": lease_secs or None,
    }


def _replica(replica: Replica, names: Mapping[str, str], now: float, clean: _Cleaner) -> dict[str, Any]:
    """One row. `names` maps upstream names to the clients' names; what is not in it is not lorafleet's doing."""
    facts = replica.facts
    return {
        "index": replica.index,
        "url": shown_url(replica.endpoint.base),
        "state": replica.state.value,
        "since_secs": round(max(now - replica.since, 0.0), 3),
        "in_flight": replica.in_flight,
        "paused": replica.paused,
        "adapters": [names[upstream] for upstream in replica.holds if upstream in names],
        "others": [upstream for upstream in replica.holds if upstream not in names],
        "last_error": clean(replica.last_error),
        "version": facts.version if facts else None,
        "requests": replica.requests,
        "failures": replica.failures,
        "tainted": {name: clean(reason) for name, reason in replica.tainted.items()},
        "block_size": facts.block_size if facts else None,
        "kv_capacity_tokens": facts.kv_capacity_tokens if facts else None,
        "max_loras": facts.max_loras if facts else None,
    }


def _adapters(fleet: Fleet, members: list[Replica], records: list[TransactionRecord]) -> list[dict[str, Any]]:
    """What is being loaded, then what is committed and what retires, newest first."""
    loading: list[dict[str, Any]] = [
        {
            "name": record.name,
            "path": None,
            "digest": None,
            "state": "loading",
            "in_flight": 0,
            "upstream": None,
            "order": None,
            "replicas": [],
        }
        for record in records
        if record.outcome == "running" and record.kind == "load" and record.name is not None
    ]
    bound = [("committed", adapter) for adapter in fleet.desired.adapters.values()]
    bound += [("retiring", adapter) for adapter in fleet.desired.retiring]
    bound.sort(key=lambda pair: -pair[1].order)
    return loading + [_adapter(fleet, members, adapter, state) for state, adapter in bound]


def _adapter(fleet: Fleet, members: list[Replica], adapter: Adapter, state: str) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "path": adapter.path,
        "digest": adapter.digest,
        "state": state,
        "in_flight": fleet.running.get(adapter.upstream, 0),
        "upstream": adapter.upstream,
        "order": adapter.order,
        "replicas": [r.index for r in members if r.state is not State.DOWN and adapter.upstream in r.holds],
    }


def _max_loras(members: Iterable[Replica]) -> int | None:
    """The fleet's slots are the smallest engine's; None while no replica has said."""
    known = [r.facts.max_loras for r in members if r.facts is not None and r.facts.max_loras is not None]
    return min(known, default=None)


def _transaction(record: TransactionRecord, wall: float, clean: _Cleaner) -> dict[str, Any]:
    """One row. The record of a running transaction is from its last phase change: the time since is a phase as well."""
    secs, phases = record.secs, list(record.phases)
    if record.outcome == "running":
        secs = max(secs, wall - record.started)
        phases.append(("under way", max(secs - sum(took for _, took in phases), 0.0)))
    return {
        "id": record.id,
        "kind": record.kind,
        "name": record.name,
        "outcome": record.outcome,
        "started": round(record.started, 3),
        "secs": round(secs, 6),
        "phases": [{"name": name, "secs": round(secs, 6)} for name, secs in phases],
        "error": clean(record.error),
    }
