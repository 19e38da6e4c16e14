"""Runs trainer.py, TRL's own trainer on a tiny model, and reads what it said."""

import asyncio
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .realenv import HERE, kill_group, model_directory, real_python, spawn, tail


def _log_in(out: Path) -> tuple[Path, int]:
    """The log of the runs in `out`, and its length so far."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "trainer.log"
    return log, log.stat().st_size if log.exists() else 0


@dataclass(frozen=True, slots=True)
class Training:
    """What a finished run printed: one dict a line, in order, and its whole output."""

    lines: list[dict[str, Any]]
    output: str

    @property
    def adapter_sync(self) -> bool:
        return bool(next(line for line in self.lines if line["kind"] == "ready")["adapter_sync"])

    @property
    def version(self) -> int:
        """The number of the last policy that was synced."""
        return int(next(line for line in self.lines if line["kind"] == "done")["version"])

    def values(self, key: str) -> list[float]:
        """TRL's own log of one metric, a value for each step that reported it."""
        return [float(line[key]) for line in self.lines if line["kind"] == "log" and key in line]


async def train(url: str, out: Path, *, size: str = "tiny", limit_secs: float = 240, **settings: object) -> Training:
    """A run against the endpoint `url` with its files in `out`; `settings` are the variables of trainer.py, lower case.

    `size` is the model's, as in tiny_model.py, and must be what the replicas serve.

    Raises AssertionError with the end of the output when the run fails or takes longer than `limit_secs`.
    """
    log, before = _log_in(out)
    env = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "LORAFLEET_"))}
    env |= {"BASE_URL": url, "MODEL": str(model_directory(size) / "model"), "OUT": str(out), "OMP_NUM_THREADS": "1"}
    env |= {key.upper(): str(value) for key, value in settings.items()}
    process = spawn([str(real_python()), str(HERE / "trainer.py")], log, cwd=out, env=env)
    try:
        await asyncio.to_thread(process.wait, limit_secs)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the trainer did not end within {limit_secs} s:\n{tail(log)}") from None
    finally:
        kill_group(process)
    output = log.read_bytes()[before:].decode(errors="replace")
    assert process.returncode == 0, f"the trainer failed:\n{tail(log, 80)}"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"kind": ')]
    return Training(lines, output)
