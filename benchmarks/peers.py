"""The routers that benchmarks compare, each a process of its own in front of given replicas.

lorafleet comes from the environment that runs the benchmark, vllm-router (pip) too if it is there; sglang-router (pip)
from that of a python that is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxy.errors import UpstreamError
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint

BINARIES = Path(sys.executable).parent
START_SECS = 60.0

Command = Callable[[list[str], int, Path], list[str]]
"""Replica URLs, the port to listen on and a scratch directory to the command line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`broadcasts`: one load call to it loads on every replica. `text`: it takes prompts as text only. `counts`: its
    /health is 200 before it knows all replicas, and /readiness says how many it knows."""

    name: str
    command: Command = field(repr=False)
    broadcasts: bool = False
    text: bool = False
    counts: bool = False


def lorafleet(policy: str, *flags: str, name: str = "") -> Peer:
    """`lorafleet serve` with one of its policies."""

    def command(urls: list[str], port: int, scratch: Path) -> list[str]:
        own = ["--port", str(port), "--policy", policy, "--state-dir", str(scratch / "state"), "--log-level", "error"]
        return [str(BINARIES / "lorafleet"), "serve", *urls, "--pause", "lazy", *own, *flags]

    return Peer(name or f"lorafleet {policy}", command, broadcasts=True)


def vllm_router(policy: str) -> Peer | None:
    """vllm-router with its defaults; None where it is not installed."""
    script = BINARIES / "vllm-router"
    return Peer(f"vllm-router {policy}", _rust([str(script)], policy), counts=True) if script.exists() else None


def sglang_router(python: Path, policy: str = "cache_aware") -> Peer:
    """sglang-router with its defaults. 0.3.2 answers 422 to a prompt of token ids: it gets the same prompts as text."""
    start = [str(python), "-m", "sglang_router.launch_router"]
    return Peer(f"sglang-router {policy}", _rust(start, policy), text=True, counts=True)


def _rust(start: list[str], policy: str) -> Command:
    def command(urls: list[str], port: int, scratch: Path) -> list[str]:
        listen = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
        return [*start, *listen, "--worker-urls", *urls, "--policy", policy, "--log-level", "error"]

    return command


def free_port() -> int:
    """A port that was free a moment ago: these routers cannot be asked which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Running:
    """A router that takes requests at `address`."""

    address: str
    pid: int


@contextlib.asynccontextmanager
async def running(peer: Peer, urls: list[str], env: Mapping[str, str] | None = None) -> AsyncIterator[Running]:
    """Start it and wait until it knows every replica; at the end it is killed.

    Raises RuntimeError, with the end of its output, when it is not ready within START_SECS.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    clean = {key: value for key, value in os.environ.items() if key != "HF_TOKEN" and not key.startswith("LORAFLEET_")}
    with tempfile.TemporaryDirectory(prefix="peer-") as scratch, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - starting takes no time
            peer.command(urls, port, Path(scratch)),
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env=clean | dict(env or {}),
        )
        try:
            if not await _ready(process, address, len(urls) if peer.counts else 0):
                output.seek(0)
                raise RuntimeError(f"{peer.name} is not ready:\n{output.read().decode(errors='replace')[-3000:]}")
            yield Running(address, process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _die_with_parent() -> None:
    """A router does not outlive a benchmark that is killed: PR_SET_PDEATHSIG of prctl(2)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


async def _ready(process: subprocess.Popen[bytes], address: str, replicas: int) -> bool:
    transport = LeanTransport()
    deadline = time.monotonic() + START_SECS
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if await _get(transport, address, "/health") is not None:
                known = await _get(transport, address, "/readiness") if replicas else None
                if not replicas or (known and known.get("healthy_workers") == replicas):
                    return True
            await asyncio.sleep(0.05)
    finally:
        await transport.close()
    return False


async def _get(transport: LeanTransport, address: str, path: str) -> dict[str, Any] | None:
    """The JSON object of a 200 (empty when it is none); None otherwise."""
    try:
        response = await transport.request(Endpoint(address), "GET", path, timeout_secs=2.0)
        raw = await response.read()
    except UpstreamError:
        return None
    if response.status != 200:
        return None
    with contextlib.suppress(ValueError):
        content = json.loads(raw)
        return content if isinstance(content, dict) else {}
    return {}
