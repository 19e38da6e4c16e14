"""What the control plane leaves behind about each transaction, for the operator's views and the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """One change to the fleet, finished or under way.

    `id` grows with each transaction. `kind` is what was asked for ("load", "unload", "pause", "resume", "reset", ...);
    `name` the adapter it is about, if any. `outcome` is "running", "committed", "undone" (failed, and the fleet is as
    before) or "failed" (something could not be put right). `started` is wall-clock seconds, `secs` how long it has
    taken, `phases` the (name, seconds) pairs in the order they ran, the current one included. `error` is what the
    client was told; it names replicas by index, never by URL.
    """

    id: int
    kind: str
    name: str | None
    outcome: str
    started: float
    secs: float
    phases: tuple[tuple[str, float], ...] = ()
    error: str | None = None
