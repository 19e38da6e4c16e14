"""GET /fleet as two tables for a person. Fields that the fleet does not send are left blank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_status(body: Mapping[str, Any], console: Console | None = None) -> None:
    """Print replicas and adapters; `console` is stdout unless given."""
    out = console or Console()
    replicas = Table("replica", "url", "state", "in flight", "adapters", "last error", title=_title(body))
    for place, replica in enumerate(_items(body.get("replicas"))):
        replicas.add_row(
            _text(replica.get("index", place)),
            _text(replica.get("url")),
            _text(replica.get("state")),
            _text(_first(replica, "in_flight", "inflight", "in-flight")),
            _text(replica.get("adapters")),
            _text(_first(replica, "last_error", "error")),
        )
    out.print(replicas)
    adapters = Table("adapter", "state", "in flight", "digest", "path")
    for adapter in _items(body.get("adapters")):
        adapters.add_row(
            _text(adapter.get("name")),
            _text(adapter.get("state")),
            _text(_first(adapter, "in_flight", "inflight", "in-flight")),
            _text(str(adapter.get("digest") or "")[:19]),
            _text(adapter.get("path")),
        )
    out.print(adapters)


def _title(body: Mapping[str, Any]) -> str:
    paused = body.get("paused")
    paused = paused.get("paused", bool(paused)) if isinstance(paused, dict) else paused
    return "fleet (paused)" if paused else "fleet"


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _first(item: Mapping[str, Any], *keys: str) -> Any:
    return next((item[key] for key in keys if item.get(key) is not None), None)


def _text(value: Any) -> Text:
    """Plain text, never markup: names come from other people."""
    if isinstance(value, dict):
        value = list(value)
    if isinstance(value, list):
        value = ", ".join(str(v.get("name", v) if isinstance(v, dict) else v) for v in value)
    return Text("" if value is None else str(value), overflow="fold")
