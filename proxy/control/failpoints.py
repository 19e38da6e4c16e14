"""Places where a test can end the process as `kill -9` would: LORAFLEET_FAILPOINT names one. No effect without it."""

from __future__ import annotations

import os
import signal

_WANTED = os.environ.get("LORAFLEET_FAILPOINT", "")


def reach(name: str) -> None:
    """Die here when this is the place that the environment names."""
    if _WANTED and name == _WANTED:
        os.kill(os.getpid(), signal.SIGKILL)
