"""`lorafleet serve` as a process that can be killed, in front of simulated replicas of this process."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy.errors import UpstreamError
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint
from tests.faults.asgi import Answer
from tests.faults.rig import CANARY

ROOT = Path(__file__).parents[2]
READY_SECS = 60.0


class ProxyProcess:
    """One proxy over its lives; all on the same state directory."""

    def __init__(self, urls: Sequence[str], state: Path, *flags: str) -> None:
        self._urls = urls
        self._flags = ["--state-dir", str(state), "--token-env", "CANARY", *flags]
        self._process: asyncio.subprocess.Process | None = None
        self._log: list[str] = []
        self._reader: asyncio.Task[None] | None = None
        self._transport = LeanTransport()
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return "".join(self._log)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, failpoint: str = "") -> None:
        """Returns when it listens, or when it is dead already."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("LORAFLEET_")}
        env |= {"CANARY": CANARY, "PYTHONPATH": str(ROOT), "LORAFLEET_FAILPOINT": failpoint}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "proxy.cli", "serve", *self._urls, "--port", str(self.port), *self._flags,
            env=env, cwd=ROOT, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        listening = asyncio.Event()
        self._reader = asyncio.create_task(self._read(self._process, listening))
        async with asyncio.timeout(READY_SECS):
            await listening.wait()

    async def _read(self, process: asyncio.subprocess.Process, listening: asyncio.Event) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            self._log.append(line.decode("utf-8", "replace"))
            found = re.search(r"at http://127\.0\.0\.1:(\d+)", self._log[-1])
            if found:
                self.port = int(found[1])
                listening.set()
        await process.wait()
        listening.set()

    async def dead(self) -> int:
        """Wait for its end; the exit status."""
        assert self._process is not None
        async with asyncio.timeout(READY_SECS):
            return await self._process.wait()

    async def kill(self) -> None:
        """kill -9, and wait."""
        if self._process is not None:
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            if self._reader is not None:
                await self._reader

    async def close(self) -> None:
        await self.kill()
        await self._transport.close()

    async def ask(self, method: str, target: str, body: Any = None) -> Answer | None:
        """None when there was no whole answer."""
        place = Endpoint(f"http://127.0.0.1:{self.port}")
        headers = ((b"content-type", b"application/json"),) if body is not None else ()
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            response = await self._transport.request(place, method, target, headers=headers, body=data)
            raw = b"".join([chunk async for chunk in response.chunks()])
        except UpstreamError:
            return None
        lines = {name.decode(): value.decode("latin-1") for name, value in response.headers}
        return Answer(response.status, lines, raw, True)

    async def view(self, target: str = "/fleet") -> Any:
        """A view as JSON; raises AssertionError when there is none."""
        answer = await self.ask("GET", target)
        assert answer is not None and answer.ok, (target, answer, self.log[-3000:])
        return answer.json()
