"""Places where a test can end the process as `kill -9` would: LORAFLEET_FAILPOINT names one. No effect without it.

`before-load` dies when the place is reached first, `before-load#3` the third time.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_WANTED, _, _TIME = os.environ.get("LORAFLEET_FAILPOINT", "").partition("#")
_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """Die here when this is the place, and the time, that the environment names."""
    if armed(name):
        os.kill(os.getpid(), signal.SIGKILL)
    if _WANTED:
        _reached[name] += 1


def armed(name: str) -> bool:
    """Whether `reach` will die here now; for places that have to prepare what a death leaves behind."""
    return bool(_WANTED) and name == _WANTED and _reached[name] + 1 >= int(_TIME or 1)
