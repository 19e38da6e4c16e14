"""What a publish gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each phase.

    `prepare` fetches tensors, waits for the lock, asks the fleet and renames; `write` writes and flushes; `verify`
    checks and hashes; `load` is the fleet's transaction; `retire` unloads and deletes.
    """

    prepare: float
    write: float
    verify: float
    load: float
    retire: float

    @property
    def total(self) -> float:
        """Seconds from the call to the return."""
        return self.prepare + self.write + self.verify + self.load + self.retire


@dataclass(frozen=True, slots=True)
class Published:
    """One published version. `name` is the model name to ask for, `path` where its files are on this machine.

    `all_b_zero` is true for an adapter that answers as the base model does. `loaded` is false when no fleet was asked.
    `unloaded` and `deleted` name the versions that fell out of the window. `warnings` says what went wrong after
    the version was live (an unload that failed): it is tried again next time.
    """

    version: int
    name: str
    path: str
    digest: str
    rank: int
    bytes: int
    all_b_zero: bool
    loaded: bool
    seconds: Timings
    unloaded: tuple[str, ...] = ()
    deleted: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        body = asdict(self)
        body["seconds"]["total"] = self.seconds.total
        return body
