"""`lorafleet serve` as a process of the environment that runs the tests, in front of real replicas."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import httpx

from .realenv import free_port, kill_group, spawn, tail
from .replica import Replica

TOKEN_VARIABLE = "REPLICA_TOKEN_OF_THIS_TEST"
STOP_SECS = 10


@dataclass
class Proxy:
    """Started with `--state-dir` in `directory`; started again on the same directory it is the same proxy."""

    directory: Path
    replicas: Sequence[Replica]
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.directory / "proxy.log"

    @property
    def token(self) -> str:
        return self.replicas[0].token

    def client(self, timeout: float = 60) -> httpx.Client:
        """What any client of the proxy uses: no token, for the proxy itself adds it."""
        return httpx.Client(base_url=self.url, timeout=timeout)

    def start(self, ready_secs: float = 60) -> None:
        """Waits until /health is 200; raises RuntimeError with the end of the log otherwise."""
        self.directory.mkdir(parents=True, exist_ok=True)
        script = Path(sys.executable).with_name("lorafleet")
        command = [str(script)] if script.exists() else [sys.executable, "-c", "from proxy.cli import main; main()"]
        command += ["serve", *(replica.url for replica in self.replicas)]
        command += [
            "--port",
            str(self.port),
            "--token-env",
            TOKEN_VARIABLE,
            "--state-dir",
            str(self.directory / "state"),
        ]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "LORAFLEET_"))}
        # The first replica's working directory: a path below /proc/self/cwd is what that replica sees.
        self.process = spawn(
            [*command, *self.flags],
            self.log,
            cwd=self.replicas[0].directory,
            env=env | {TOKEN_VARIABLE: self.token, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        deadline = time.monotonic() + ready_secs
        with self.client(timeout=5) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the proxy ended while starting:\n{tail(self.log)}")
                try:
                    if client.get("/health").status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        raise RuntimeError(f"the proxy was not healthy after {ready_secs} s:\n{tail(self.log)}")

    def kill(self) -> None:
        """kill -9, as a crash of the proxy."""
        if self.process is not None:
            kill_group(self.process)
            self.process = None

    def stop(self) -> None:
        """Ctrl-C, and what every run of the proxy must keep: a quick, quiet end, and the token shown to nobody."""
        if self.process is None:
            return
        shown = self._pages()
        os.kill(self.process.pid, signal.SIGINT)
        try:
            status = self.process.wait(STOP_SECS)
        except TimeoutExpired:
            raise AssertionError(f"the proxy runs on {STOP_SECS} s after Ctrl-C:\n{tail(self.log)}") from None
        finally:
            self.kill()
        output = self.log.read_text(errors="replace")
        assert status in (0, 130), f"the proxy ended with {status}:\n{tail(self.log)}"
        assert "Traceback" not in output, (
            f"the proxy printed a traceback:\n{output[output.index('Traceback') :][:4000]}"
        )
        shown |= {"its output": output}
        shown |= {str(p): p.read_text(errors="replace") for p in self.directory.rglob("*") if p.is_file()}
        leaks = [where for where, text in shown.items() if self.token in text]
        assert not leaks, f"the token can be read in: {', '.join(leaks)}"

    def _pages(self) -> dict[str, str]:
        """The operator's views, and the command line, as anybody on the machine can read them."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the proxy ended by itself:\n{tail(self.log)}")
        with self.client(timeout=10) as client:
            pages = {path: client.get(path).text for path in ("/", "/fleet", "/metrics", "/health", "/server_info")}
        return pages | {"argv": Path(f"/proc/{self.process.pid}/cmdline").read_text()}

    # -- what the proxy says of itself

    def get(self, path: str) -> Any:
        with self.client() as client:
            return client.get(path).raise_for_status().json()

    def fleet(self) -> dict[str, Any]:
        """GET /fleet."""
        fleet = self.get("/fleet")
        assert isinstance(fleet, dict)
        return fleet

    def listed(self) -> list[str]:
        """The adapter names in /v1/models; the base model, which must come first, is left out."""
        names = [model["id"] for model in self.get("/v1/models")["data"]]
        assert names[0] == "base"
        return names[1:]

    def post(self, path: str, body: object = None, **query: str) -> httpx.Response:
        with self.client(timeout=300) as client:
            content = None if body is None else json.dumps(body)
            return client.post(path, content=content, params=query, headers={"content-type": "application/json"})

    def load(self, name: str, path: Path | str) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), "load_inplace": False})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})


@contextmanager
def serving(directory: Path, replicas: Sequence[Replica], *flags: str) -> Iterator[Proxy]:
    """A proxy while the block lasts. At its end `stop` checks what it must; after a failure it is only killed."""
    proxy = Proxy(directory, replicas, flags)
    try:
        proxy.start()
        yield proxy
    except BaseException:
        proxy.kill()
        raise
    proxy.stop()
