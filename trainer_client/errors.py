"""Errors of the trainer's side. Standard library only: the proxy imports this through `digest` and `manifest`.

Two families: what is wrong with an adapter or the disk (`PublishError`), and what the fleet said (`FleetError`).
No message ever holds an API key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TrainerClientError(Exception):
    """Base of every error that this package raises on purpose."""


class PublishError(TrainerClientError):
    """A publish did not happen: disk and fleet are as they were."""


class AdapterError(PublishError):
    """The adapter cannot be served. `key` names the tensor, the config entry or the file at fault."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key}: {reason}")
        self.key = key
        self.reason = reason


class IncompleteAdapter(AdapterError):
    """Files are missing or shorter than they say: still being written, or a mount that lags. Worth another try."""


class DiskFull(PublishError):
    """No space (or quota) left. What was half written has been removed; earlier versions are untouched."""


class RootBusy(PublishError):
    """Another live publisher holds this root and name."""


class FleetError(TrainerClientError):
    """Base of what went wrong between here and the fleet."""


class FleetUnreachable(FleetError):
    """No answer that comes from the fleet: refused, reset, timed out, or a gateway's own 502/503/504.

    What was asked may or may not have happened, so ask the fleet before concluding anything.
    """


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """What one replica said in a failed transaction. `index` is its place on the proxy's command line."""

    index: int
    status: int | None
    message: str


class FleetRefused(FleetError):
    """The fleet answered no. A refused load or unload changed nothing on any replica.

    `repeated` is true when the answer is to a second try, after the answer to the first was lost.
    """

    def __init__(
        self, status: int, message: str, replicas: Sequence[ReplicaAnswer] = (), *, repeated: bool = False
    ) -> None:
        said = "".join(f"; replica {r.index}: {r.message}" for r in replicas if r.message not in message)
        super().__init__(f"{message}{said} (status {status})")
        self.status = status
        self.message = message
        self.replicas = tuple(replicas)
        self.repeated = repeated
