"""What a table of measurements must say about where and with what it was measured."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def facts(*packages: str) -> dict[str, str]:
    """Date, processor, cores, Python, and the versions of `packages` ("absent" for those that are not installed)."""
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def line(found: dict[str, str]) -> str:
    """The facts on one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def cpu_secs(pid: int | str = "self") -> float:
    """Processor time of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def all_cpu_secs() -> float:
    """Processor time of everything on this machine so far, time that its host took away included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _processor() -> str:
    try:
        names = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.machine()
