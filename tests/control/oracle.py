"""What clients were told, and therefore what a name may mean: the model that the control plane is held against.

A name has a set of possible meanings (weights, or None: nothing). An operation that was answered alone leaves one; one
that failed leaves what was there before; one whose answer never came leaves both. Operations on one name that overlap
leave what any of those that succeeded asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Meaning = str | None


@dataclass(eq=False)
class Operation:
    """A load (of one of `targets`) or an unload (targets: None) in progress."""

    name: str
    kind: str
    targets: set[Meaning]
    outcome: str = "running"


@dataclass
class Batch:
    """Operations on one name that overlap in time, and what the name could mean before them."""

    before: frozenset[Meaning]
    forgotten: bool = False
    operations: list[Operation] = field(default_factory=list)


class Oracle:
    def __init__(self) -> None:
        self._settled: dict[str, frozenset[Meaning]] = {}
        self._open: dict[str, Batch] = {}

    def begin(self, name: str, kind: str, targets: Iterable[Meaning]) -> Operation:
        operation = Operation(name, kind, set(targets))
        batch = self._open.setdefault(name, Batch(self.possible(name)))
        batch.operations.append(operation)
        return operation

    def end(self, operation: Operation, outcome: str) -> None:
        """`outcome` is "ok", "failed" (the client was told so) or "unknown" (it heard nothing)."""
        operation.outcome = outcome
        batch = self._open[operation.name]
        if any(other.outcome == "running" for other in batch.operations):
            return
        del self._open[operation.name]
        certain = [op for op in batch.operations if op.outcome == "ok"]
        open_ended = [op for op in batch.operations if op.outcome == "unknown"]
        meanings: set[Meaning] = set() if certain else set(batch.before)
        for op in (*certain, *open_ended):
            meanings |= op.targets
        if batch.forgotten:
            meanings.add(None)
        self._settled[operation.name] = frozenset(meanings)

    def possible(self, name: str) -> frozenset[Meaning]:
        """All that `name` may mean now."""
        batch = self._open.get(name)
        if batch is None:
            return self._settled.get(name, frozenset({None}))
        meanings = set(batch.before) | ({None} if batch.forgotten else set())
        for op in batch.operations:
            meanings |= op.targets
        return frozenset(meanings)

    def forgets(self, name: str) -> None:
        """The fleet had a reason to take the name away: it may mean nothing from now on."""
        self._settled[name] = self._settled.get(name, frozenset()) | {None}
        if name in self._open:
            self._open[name].forgotten = True

    def names(self) -> list[str]:
        return list(self._settled)

    def unloading(self, name: str) -> bool:
        batch = self._open.get(name)
        return batch is not None and any(op.kind == "unload" for op in batch.operations)

    def loading(self) -> bool:
        """Whether any load is in progress."""
        return any(op.kind == "load" and op.outcome == "running" for b in self._open.values() for op in b.operations)
