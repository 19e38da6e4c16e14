"""Every error that lorafleet raises itself: whose fault it is, how far the request had got, and the status it becomes.

Foreign exceptions (the HTTP client's, the operating system's) are translated at the door of `proxy.upstream`; nothing
behind that door needs to know which library made them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec


class Phase(enum.Enum):
    """How far a request to a replica had got. It decides what may be sent again.

    NOT_SENT: no byte of the request left (refused, no route): any other replica may be asked.
    MAYBE_SENT: the replica may have seen it, no response byte came back: a completion may be asked once elsewhere, a
        control call must read the truth from the replica first.
    MID_STREAM: part of the response is with the client: nothing can be repeated, the client's connection is aborted.
    """

    NOT_SENT = "not sent"
    MAYBE_SENT = "maybe sent"
    MID_STREAM = "mid stream"


class LorafleetError(Exception):
    """Root of the tree. `status` is the HTTP status that a client sees, `kind` the `type` of the error body."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error in the shape that vLLM and OpenAI clients parse; `code` is an int equal to the status."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}}

    def json(self) -> bytes:
        return msgspec.json.encode(self.body())


# -- the client's fault ------------------------------------------------------------------------------------------------


class BadRequest(LorafleetError):
    status = 400
    kind = "BadRequestError"


class Unauthorized(LorafleetError):
    status = 401
    kind = "AuthenticationError"


class NotFound(LorafleetError):
    status = 404
    kind = "NotFoundError"


class MethodNotAllowed(LorafleetError):
    status = 405
    kind = "MethodNotAllowedError"


class Conflict(LorafleetError):
    """The request is well formed and the fleet's state forbids it (slots full, name being unloaded)."""

    status = 409
    kind = "ConflictError"


class BodyTooLarge(LorafleetError):
    status = 413
    kind = "RequestEntityTooLarge"


class NotSupported(LorafleetError):
    status = 501
    kind = "NotImplementedError"


# -- the fleet's fault -------------------------------------------------------------------------------------------------


class Unavailable(LorafleetError):
    """Nobody can serve this now. `retry_after_secs` becomes the Retry-After header."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_secs: int = 1) -> None:
        super().__init__(message)
        self.retry_after_secs = retry_after_secs


@dataclass(frozen=True, slots=True)
class ReplicaAnswer:
    """What one replica said to a control call, or what became of the change there. `status` is None when no answer
    came. Not `at_fault`: the change did not fail for this replica's sake."""

    replica: int
    status: int | None
    message: str
    at_fault: bool = True

    def __str__(self) -> str:
        said = f"{self.status}: " if self.status is not None else ""
        return f"replica {self.replica}: {said}{self.message}"


class TransactionFailed(LorafleetError):
    """A change did not happen on the whole fleet. Lists each replica that took part by index, never by URL; the message
    has those at fault.

    `undone` is False when a replica could not be put back; it is not routable until the reconciler has done so.
    """

    status = 502
    kind = "TransactionFailed"

    def __init__(
        self, message: str, answers: Sequence[ReplicaAnswer] = (), *, status: int | None = None, undone: bool = True
    ) -> None:
        listed = "; ".join(str(answer) for answer in answers if answer.at_fault)
        super().__init__(f"{message} ({listed})" if listed else message)
        self.answers = tuple(answers)
        self.undone = undone
        if status is not None:
            self.status = status

    def body(self) -> dict[str, Any]:
        body = super().body()
        body["error"]["replicas"] = [
            {"replica": a.replica, "status": a.status, "message": a.message} for a in self.answers
        ]
        return body


class UpstreamError(LorafleetError):
    """A call to a replica broke. `phase` says what may be done about it; the message names no URL and no token."""

    status = 502
    kind = "UpstreamError"

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase


class UpstreamTimeout(UpstreamError):
    """An admin call's own deadline passed (completions have none)."""

    status = 504


class Unmergeable(LorafleetError):
    """A replica's answer to a part of a batch does not fit the others. Not held against the replica: what a client
    asked for may be the reason."""

    status = 502
    kind = "UpstreamError"


# -- the operator's fault ----------------------------------------------------------------------------------------------


class ConfigError(LorafleetError):
    """A setting is wrong. The message names the flag and the mend; the command ends with exit code 2."""
