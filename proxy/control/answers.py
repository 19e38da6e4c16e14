"""What a replica can say to the control plane, and the calls it can be asked. Values and an interface, no network.

`proxy.upstream.vllm` implements the interface over HTTP; tests implement it in memory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.errors import ReplicaAnswer

if TYPE_CHECKING:
    from proxy.control.facts import Facts
    from proxy.upstream.transport import Endpoint


class Outcome(enum.Enum):
    OK = "ok"
    REFUSED = "refused"  # a definite no
    UNKNOWN_NAME = "unknown name"  # unload of a name that it does not list
    EXISTS = "exists"  # load of a name that it lists already
    NOT_VISIBLE = "not visible"  # the files are not there yet, or not whole yet
    UNREACHABLE = "unreachable"  # no byte of the request left
    NO_ANSWER = "no answer"  # it may have happened: the truth must be read


@dataclass(frozen=True, slots=True)
class Answer:
    outcome: Outcome
    status: int | None
    message: str
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    def of(self, replica: int) -> ReplicaAnswer:
        return ReplicaAnswer(replica, self.status, self.message)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a replica shows at one moment: upstream names with the path each was loaded from, and whether it is paused.

    `adapters` leaves out base models. `paused` is None where the replica has no such endpoint.
    """

    adapters: Mapping[str, str | None]
    base_models: tuple[str, ...]
    base_root: str | None
    max_model_len: int | None
    paused: bool | None
    asleep: bool | None = None


class ReplicaCalls(Protocol):
    """The admin calls of the control plane. None raises for what a replica does; cancelling one closes its socket."""

    async def load(self, endpoint: Endpoint, upstream: str, path: str, timeout_secs: float) -> Answer: ...

    async def unload(self, endpoint: Endpoint, upstream: str, timeout_secs: float) -> Answer: ...

    async def post(self, endpoint: Endpoint, target: str, timeout_secs: float | None, body: bytes = b"") -> Answer: ...

    async def health(self, endpoint: Endpoint, timeout_secs: float) -> Answer: ...

    async def observe(self, endpoint: Endpoint, timeout_secs: float, *, sleep: bool = False) -> Observed | Answer: ...

    async def facts(self, endpoint: Endpoint, observed: Observed, timeout_secs: float) -> Facts: ...

    async def probe(self, endpoint: Endpoint, model: str, timeout_secs: float) -> tuple[float, ...] | Answer: ...
