"""A hook for crash tests: dies as by `kill -9` when a publish reaches the step that the environment names."""

from __future__ import annotations

import os
import signal

VARIABLE = "LORAFLEET_PUBLISH_FAILPOINT"
STEPS = (
    "temporary",  # the temporary directory exists, empty
    "config",  # adapter_config.json is written
    "weights",  # and the tensors
    "verified",
    "manifest",  # complete and flushed, still under the temporary name
    "reserved",  # the number is taken for good
    "renamed",
    "loaded",
    "unloaded",
    "retired",  # an old version has its temporary name, its files are still there
    "done",
)


def reach(step: str) -> None:
    """Do nothing, or die without any clean-up if this is the step to die at."""
    if os.environ.get(VARIABLE) == step:
        os.kill(os.getpid(), signal.SIGKILL)
