"""When Python looks for reference cycles: not while requests wait.

Its collector goes through all objects once their number has grown by a quarter. With a million blocks in the routing
index that took 20 to 100 ms, in which nobody is served, and the frequent small collections took about 7 % of the time
of a short request (both measured). Cycles are rare here: nearly everything is freed by its reference count.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE = 20_000, 50
"""New objects until a small collection; small collections until a middle one. The great one is started by hand."""

NEVER = 1 << 30
QUIET_SECS = 60.0
"""At least so long between two great collections, each at a moment without requests."""

LATEST_SECS = 1800.0
"""After so long without such a moment it happens all the same."""


def calm() -> None:
    """For the process that serves: what exists now is not looked at again, and collections become rare."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)


class Sweeper:
    """Starts the great collections. `tick` it about once a second; times in seconds of any clock."""

    def __init__(self, now: float) -> None:
        self._last = now

    def tick(self, now: float, *, busy: bool) -> bool:
        """True when it collected."""
        age = now - self._last
        if age < (LATEST_SECS if busy else QUIET_SECS):
            return False
        self._last = now
        gc.collect()
        return True
