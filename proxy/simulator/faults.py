"""Faults on demand: what a replica does wrong, on which calls, and for how long.

A fault is matched by route and, if it says so, by name (``lora_name`` or ``model``). What each kind does:

=================  ====================================================================================================
``refuse``         cut the call and stop listening, for ``secs`` or until cleared; added without a route: at once
``reset``          TCP reset before any byte of the answer
``reset_body``     reset in the middle of the answer: after ``after`` chunks of a stream, else after half the body
``stall``          hang in the middle of the answer, at the same places
``hang``           no answer until the client leaves (or for ``secs``, then the normal one)
``slow``           the normal answer after ``secs``
``error``          ``status`` (500 unless given) in vLLM's error shape; kinds ``500`` and ``503`` are short for it
``garbage``        200 with a body that is no JSON
``not_visible``    load: 404, as while a mount lags
``already_loaded`` load: 400, as if the name were taken
``no_effect``      200 and nothing done; a load is listed, and the base model answers under its name
``lost_answer``    done, then reset before any byte of the answer
``wrong_weights``  load: done with the adapter in ``path`` instead (or with weights nobody has)
``restart``        the process state is lost, every connection cut; not listening for ``secs``
``crash``          the same, and it stays down until it is started
=================  ====================================================================================================

``effect``: do the call first, then misbehave (for reset, hang, error, garbage).
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

ROUTES = (
    "load",
    "unload",
    "pause",
    "resume",
    "reset",
    "is_paused",
    "models",
    "completion",
    "stream",
    "health",
    "server_info",
    "any",
)
"""``completion`` and ``stream`` are the generation routes; other paths match their own first segments, or ``any``."""

KINDS = (
    "refuse",
    "reset",
    "reset_body",
    "stall",
    "hang",
    "slow",
    "error",
    "500",
    "503",
    "garbage",
    "not_visible",
    "already_loaded",
    "no_effect",
    "lost_answer",
    "wrong_weights",
    "restart",
    "crash",
)


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One fault. ``times``: how many calls it hits (None: all); ``skip``: how many it lets through first;
    ``probability`` of each; ``until_secs``: it ends that long after it was added."""

    kind: str
    route: str = "any"
    name: str | None = None
    times: int | None = None
    skip: int = 0
    probability: float = 1.0
    until_secs: float | None = None
    secs: float | None = None
    after: int = 1
    status: int = 500
    path: str | None = None
    effect: bool = False
    hits: int = 0
    added: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind of fault: {self.kind!r}")
        if self.kind in ("500", "503"):
            self.status, self.kind = int(self.kind), "error"


class Faults:
    """The faults of one replica, in the order they were added; the first that matches hits."""

    def __init__(self, seed: int = 0) -> None:
        self.active: list[Fault] = []
        self.clock: Callable[[], float] = lambda: 0.0
        """The time that ``until_secs`` counts from; a replica's is its event loop's."""
        self.refuse_now: Callable[[float | None], None] = lambda _secs: None
        self._random = random.Random(seed)

    def add(self, kind: str, route: str = "any", *, now: float | None = None, **details: Any) -> Fault:
        """Add a fault; raises msgspec.ValidationError (a ValueError) for one that makes no sense."""
        fault = self.add_json({"kind": kind, "route": route, **details}, self.clock() if now is None else now)
        if fault.kind == "refuse" and route == "any":
            self.remove(fault)
            self.refuse_now(fault.secs)
        return fault

    def add_json(self, spec: Mapping[str, Any], now: float) -> Fault:
        """The same from JSON; does not act on ``refuse``."""
        fault = msgspec.convert({**spec, "added": now}, Fault)
        self.active.append(fault)
        return fault

    def clear(self, route: str | None = None) -> None:
        """Remove all faults, or those of one route."""
        self.active = [fault for fault in self.active if route is not None and fault.route != route]

    def remove(self, fault: Fault) -> None:
        self.active = [other for other in self.active if other is not fault]

    def take(self, route: str, name: str | None, now: float) -> Fault | None:
        """The fault that this call meets, counted; None for a call that goes well."""
        for fault in list(self.active):
            if fault.until_secs is not None and now >= fault.added + fault.until_secs:
                self.remove(fault)
                continue
            if fault.route not in ("any", route) or (fault.name is not None and fault.name != name):
                continue
            if fault.skip > 0:
                fault.skip -= 1
                continue
            if fault.probability < 1.0 and self._random.random() >= fault.probability:
                continue
            fault.hits += 1
            if fault.times is not None:
                fault.times -= 1
                if fault.times <= 0:
                    self.remove(fault)
            return fault
        return None
