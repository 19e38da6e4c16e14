from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SCRIPT = """
from proxy.control.failpoints import armed, reach
for turn in range(1, 4):
    for name in ("a", "b"):
        print(name, turn, armed(name), flush=True)
        reach(name)
"""


@pytest.mark.parametrize(
    ("wanted", "status", "lines"),
    [
        ("", 0, 6),
        ("nowhere", 0, 6),
        ("a", -signal.SIGKILL, 1),
        ("b", -signal.SIGKILL, 2),
        ("a#3", -signal.SIGKILL, 5),
        ("b#4", 0, 6),
    ],
)
def test_where_and_when(wanted: str, status: int, lines: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={"LORAFLEET_FAILPOINT": wanted}
    )
    said = done.stdout.splitlines()
    assert (done.returncode, len(said)) == (status, lines)
    assert [line.split()[-1] for line in said] == ["False"] * (lines - 1) + [str(status != 0)]
