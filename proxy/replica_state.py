"""The states of a replica and what moves it between them, as one table.

Rules:

- Only READY replicas are offered work. SUSPECT ones are offered work when nobody is READY.
- A replica becomes READY only by CAUGHT_UP: it was observed to hold exactly what the fleet should hold.
- One broken call makes a READY replica SUSPECT; the next probe decides whether it was the replica (DOWN) or not (READY
  again, through CAUGHT_UP). The last READY replica is not ejected for a broken call (see `Fleet.call_failed`).
- DRAINING is the operator's word and only the operator takes it back.
"""

from __future__ import annotations

import enum


class State(enum.Enum):
    JOINING = "joining"
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DOWN = "down"


class Event(enum.Enum):
    CAUGHT_UP = "caught up"  # observed equal to the desired state
    DRIFTED = "drifted"  # answers, but does not hold what it should (restarted, behind, tainted)
    CALL_FAILED = "call failed"  # a completion or control call broke in transport or with 5xx
    PROBE_FAILED = "probe failed"  # the health check got no good answer
    DRAIN = "drain"
    UNDRAIN = "undrain"


TABLE: dict[State, dict[Event, State]] = {
    State.JOINING: {
        Event.CAUGHT_UP: State.READY,
        Event.PROBE_FAILED: State.DOWN,
        Event.DRAIN: State.DRAINING,
    },
    State.READY: {
        Event.DRIFTED: State.JOINING,
        Event.CALL_FAILED: State.SUSPECT,
        Event.PROBE_FAILED: State.DOWN,
        Event.DRAIN: State.DRAINING,
    },
    State.SUSPECT: {
        Event.CAUGHT_UP: State.READY,
        Event.DRIFTED: State.JOINING,
        Event.PROBE_FAILED: State.DOWN,
        Event.DRAIN: State.DRAINING,
    },
    State.DOWN: {
        Event.CAUGHT_UP: State.READY,
        Event.DRIFTED: State.JOINING,
        Event.DRAIN: State.DRAINING,
    },
    State.DRAINING: {Event.UNDRAIN: State.JOINING},
}


def after(state: State, event: Event) -> State:
    """The state that `event` leads to; an event without an entry changes nothing."""
    return TABLE[state].get(event, state)
