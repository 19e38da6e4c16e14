"""One replica as a process of its own: ``python -m proxy.simulator``, and a handle on it for tests that kill -9."""

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from proxy.simulator.embed import SimReplica
from proxy.simulator.options import ReplicaOptions


def parser() -> argparse.ArgumentParser:
    """A flag for every field of ReplicaOptions, plus --host and --port."""
    out = argparse.ArgumentParser(prog="python -m proxy.simulator", description="A simulated vLLM replica.")
    out.add_argument("--host", default="127.0.0.1")
    out.add_argument("--port", type=int, default=0, help="0: any free one; it is printed")
    hints = get_type_hints(ReplicaOptions)
    for field in fields(ReplicaOptions):
        flag = "--" + field.name.replace("_", "-")
        default = None if field.default is MISSING else field.default
        if hints[field.name] is bool:
            out.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
        else:
            kind = {int: int, float: float}.get(hints[field.name], int if hints[field.name] == int | None else str)
            out.add_argument(flag, type=kind, default=default)
    return out


async def serve(options: ReplicaOptions, host: str, port: int) -> int:
    """Serve until SIGINT or SIGTERM, or until a fault or a dead engine ends the process; the exit status."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, 0)
    replica = SimReplica(options, host, port)
    restart = replica.replica.on_restart

    def died(secs: float | None) -> None:
        if secs is None:
            # As an engine core that died: the clients that wait still get their 500 first.
            loop.call_later(0.05, end, 1)
        else:
            restart(secs)

    replica.replica.on_restart = died
    await replica.start()
    print(f"port {replica.http.port}", flush=True)
    status: int = await ended
    replica.close()
    return status


def main() -> None:
    arguments = vars(parser().parse_args())
    host, port = arguments.pop("host"), arguments.pop("port")
    run: Any = asyncio.run
    with contextlib.suppress(ImportError):
        import uvloop

        run = uvloop.run
    sys.exit(run(serve(ReplicaOptions(**arguments), host, port)))


class SimProcess:
    """A replica in a child process; a context manager that ends it."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        """Options are ReplicaOptions'; returns when it listens. Raises RuntimeError when it does not start."""
        command = [sys.executable, "-m", "proxy.simulator", "--port", str(port)]
        for name, value in options.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                command.append(flag if value else "--no-" + flag[2:])
            else:
                command += [flag, str(value)]
        self.options = options
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line.startswith("port "):
            self.kill()
            raise RuntimeError(f"the replica did not start: {line!r}")
        self.port = int(line.split()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self._child.kill()
        self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def wait(self, timeout: float | None = None) -> int:
        """Exit status, when it ends by itself."""
        return self._child.wait(timeout)

    def restarted(self) -> "SimProcess":
        """Kill it, and start a new one on the same port."""
        self.kill()
        return SimProcess(self.port, **self.options)

    def __enter__(self) -> "SimProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
