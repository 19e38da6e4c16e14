"""`lorafleet serve` as a process of its own, with what the kernel says about it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine
from trainer_client import FleetClient

ROOT = Path(__file__).parents[1]
START_SECS = 60.0
TOKEN_VARIABLE = "BENCHMARK_TOKEN"


@dataclass(frozen=True, slots=True)
class Served:
    """A running proxy: its address, its process id and the file that it logs to."""

    url: str
    pid: int
    log: Path

    def rss(self) -> int:
        """Resident memory in bytes."""
        found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0

    def descriptors(self) -> int:
        """Open file descriptors, sockets included."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_secs(self) -> float:
        """Processor time so far, user and system."""
        return machine.cpu_secs(self.pid)

    def lines(self) -> list[str]:
        """What it has logged so far."""
        return self.log.read_text(errors="replace").splitlines()


@contextlib.contextmanager
def serving(urls: Sequence[str], scratch: Path, token: str, *flags: str) -> Iterator[Served]:
    """Start it on a free port and wait until every replica is ready; at the end it is killed.

    `scratch` gets its state and its log. Raises RuntimeError with the end of its log when it does not come up.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    log = scratch / "log"
    clean = {key: value for key, value in os.environ.items() if key != "HF_TOKEN" and not key.startswith("LORAFLEET_")}
    command = [sys.executable, "-m", "proxy.cli", "serve", *urls, "--port", "0", "--state-dir", str(scratch / "state")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--token-env", TOKEN_VARIABLE, *flags],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**clean, TOKEN_VARIABLE: token},
            start_new_session=True,
        )
    try:
        served = Served(_address(process, log), process.pid, log)
        with FleetClient(served.url, api_key="") as client:
            client.wait_ready(timeout=START_SECS, poll=0.05)
        yield served
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r" at (http://127\.0\.0\.1:\d+)", log.read_text(errors="replace"))
        if found:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the proxy did not start:\n{log.read_text(errors='replace')[-3000:]}")
