"""How many sequences of one group run where. A group is all that is placed by one key: siblings, and their turns."""

from collections.abc import Mapping
from typing import Final

from proxy.routing.load import Trace

_NONE: Final[dict[int, int]] = {}


class Kin:
    """Sequences in flight, by key and slot."""

    def __init__(self) -> None:
        self._running: dict[int, dict[int, int]] = {}

    def of(self, key: int) -> Mapping[int, int]:
        """Slots with sequences of this group, and how many; to be read at once."""
        return self._running.get(key, _NONE)

    def join(self, trace: Trace, slot: int) -> None:
        """The request begins on `slot`."""
        running = trace.kin = self._running.setdefault(trace.key, {})
        trace.slot = slot
        running[slot] = running.get(slot, 0) + trace.sequences

    def leave(self, trace: Trace) -> None:
        """The request is over; nothing if it never joined."""
        running = trace.kin
        if running is not None:
            trace.kin = None
            running[trace.slot] -= trace.sequences
            if not running[trace.slot]:
                del running[trace.slot]
                if not running and self._running.get(trace.key) is running:
                    del self._running[trace.key]
