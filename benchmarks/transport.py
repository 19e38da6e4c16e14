"""What one upstream request costs: both transports and the floor under them, side by side against nginx, on one core.

    python -m benchmarks.transport [--secs 2] [--rounds 3] [--clients 32] [--json FILE] [--profile FILE]

The floor is a bare asyncio protocol that writes ready-made bytes and waits until as many bytes as expected came back:
the event loop and the kernel, and nothing of HTTP. CPU time is this process's alone, so it hardly depends on what else
runs on the machine; requests/s do. Needs nginx (Debian package nginx-light).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import uvloop

from proxy.upstream.aiohttp_transport import AiohttpTransport
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint, Transport

SEED = 7
HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"user-agent", b"python-requests/2.32.3"),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept", b"*/*"),
    (b"connection", b"keep-alive"),
    (b"content-type", b"application/json"),
]
ANSWER = {
    "id": "c",
    "object": "text_completion",
    "choices": [
        {
            "index": 0,
            "text": "",
            "token_ids": list(range(1, 17)),
            "logprobs": {"token_logprobs": [-0.1, -0.2, -0.3, -0.4] * 4},
            "finish_reason": "length",
        }
    ],
    "usage": {"prompt_tokens": 600, "completion_tokens": 16, "total_tokens": 616},
}
NGINX = """
worker_processes 1; daemon off; pid {dir}/pid; error_log {dir}/err warn; events {{ worker_connections 4096; }}
http {{ access_log off; keepalive_requests 1000000; client_body_buffer_size 4m; client_max_body_size 64m;
 client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u;
 scgi_temp_path {dir}/s; default_type application/json; root {dir};
 server {{ listen 127.0.0.1:{port} backlog=4096;
  location / {{ return 200 '{answer}'; }}
  location /big {{ sendfile on; }}
 }} }}
"""
One = Callable[[], Awaitable[int]]
"""Does one request and gives the size of its response body."""


@dataclass(frozen=True)
class Load:
    name: str
    method: str
    target: str
    body: bytes


@dataclass(frozen=True)
class Figure:
    transport: str
    load: str
    requests_per_sec: float
    cpu_us_per_request: float
    megabytes_per_sec: float


def prompt(tokens: int) -> bytes:
    """A completion request as TRL sends it."""
    dice = random.Random(SEED)
    ids = [dice.randint(3, 150_000) for _ in range(tokens)]
    rest = {"max_tokens": 16, "temperature": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 123456789}
    return json.dumps({"model": "base", "prompt": ids, **rest}, separators=(",", ":")).encode()


LOADS = (
    Load("600 tokens", "POST", "/v1/completions", prompt(600)),
    Load("8,000 tokens", "POST", "/v1/completions", prompt(8000)),
    Load("1 MB response", "GET", "/big", b""),
)


@contextlib.contextmanager
def nginx() -> Iterator[int]:
    """An nginx on the first core; gives its port."""
    command = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if command is None:
        sys.exit("this benchmark needs nginx (Debian package nginx-light)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        Path(directory, "big").write_bytes(b"0123456789abcdef" * 65_536)
        config = Path(directory, "nginx.conf")
        config.write_text(NGINX.format(dir=directory, port=port, answer=json.dumps(ANSWER, separators=(",", ":"))))
        process = subprocess.Popen([command, "-c", config], preexec_fn=lambda: os.sched_setaffinity(0, {min(cores())}))
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait()


def cores() -> set[int]:
    return _CORES


_CORES = os.sched_getaffinity(0)


def over(transport: Transport, port: int, load: Load) -> One:
    endpoint = Endpoint(f"http://127.0.0.1:{port}", lambda: "token-of-the-replica")

    async def one() -> int:
        response = await transport.request(endpoint, load.method, load.target, headers=HEADERS, body=load.body)
        assert response.status == 200
        whole = response.whole()
        if whole is not None:
            return len(whole)
        size = 0
        async for chunk in response.chunks():
            size += len(chunk)
        return size

    return one


class Bare(asyncio.Protocol):
    """The floor."""

    def __init__(self) -> None:
        self.missing = 0
        self.waiter: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.missing -= len(data)
        if self.missing <= 0 and self.waiter is not None:
            self.waiter.set_result(None)


async def floor(port: int, load: Load) -> One:
    length = b"content-length: %d\r\n" % len(load.body) if load.body else b""
    request = b"%b %b HTTP/1.1\r\nhost: a\r\n%b\r\n%b" % (load.method.encode(), load.target.encode(), length, load.body)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    size = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1])
    writer.close()
    loop = asyncio.get_running_loop()
    idle: list[Bare] = []

    async def one() -> int:
        if idle:
            bare = idle.pop()
        else:
            _, bare = await loop.create_connection(Bare, "127.0.0.1", port)
        bare.waiter = loop.create_future()
        bare.missing = len(head) + size
        bare.transport.write(request)  # type: ignore[attr-defined]
        await bare.waiter
        idle.append(bare)
        return size

    return one


async def measure(name: str, load: Load, one: One, clients: int, secs: float) -> Figure:
    await asyncio.gather(*(one() for _ in range(clients)))
    done = size = 0

    async def client() -> None:
        nonlocal done, size
        while time.perf_counter() < until:
            received = await one()
            size += received
            done += 1

    start, cpu = time.perf_counter(), time.process_time()
    until = start + secs
    await asyncio.gather(*(client() for _ in range(clients)))
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    return Figure(name, load.name, done / elapsed, cpu / done * 1e6, (size + done * len(load.body)) / elapsed / 1e6)


async def compare(port: int, clients: int, secs: float, rounds: int, profile: str | None) -> list[Figure]:
    transports: dict[str, Transport] = {"aiohttp": AiohttpTransport(), "lean": LeanTransport()}
    figures = []
    for load in LOADS:
        ways = {name: over(transport, port, load) for name, transport in transports.items()}
        ways["floor"] = await floor(port, load)
        for _ in range(rounds):
            figures += [await measure(name, load, one, clients, secs) for name, one in ways.items()]
    if profile:
        with cProfile.Profile() as profiler:
            await measure("lean", LOADS[0], over(transports["lean"], port, LOADS[0]), clients, secs)
        profiler.dump_stats(profile)
    for transport in transports.values():
        await transport.close()
    return figures


def table(figures: list[Figure]) -> str:
    """Medians over the rounds; the ratio is of CPU time, aiohttp's to this one's."""
    lines = [f"{'':16}{'':10}{'requests/s':>12}{'CPU us/request':>16}{'MB/s':>9}{'ratio':>8}"]
    for load in LOADS:
        medians = {}
        for name in ("aiohttp", "lean", "floor"):
            rows = [each for each in figures if (each.transport, each.load) == (name, load.name)]
            medians[name] = statistics.median(each.cpu_us_per_request for each in rows)
            speed = statistics.median(each.requests_per_sec for each in rows)
            volume = statistics.median(each.megabytes_per_sec for each in rows)
            ratio = medians["aiohttp"] / medians[name]
            lines.append(f"{load.name:16}{name:10}{speed:12,.0f}{medians[name]:16.1f}{volume:9,.0f}{ratio:8.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secs", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=32, help="requests in flight")
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--profile", help="write a cProfile of the lean transport to this file")
    options = parser.parse_args()
    with nginx() as port:
        os.sched_setaffinity(0, {max(cores())})
        figures = uvloop.run(compare(port, options.clients, options.secs, options.rounds, options.profile))
    versions = ", ".join(f"{name} {version(name)}" for name in ("aiohttp", "httptools", "uvloop"))
    print(f"Python {platform.python_version()}, {versions}, {platform.machine()}, {options.clients} in flight")
    print(table(figures))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(each) for each in figures], indent=1))


if __name__ == "__main__":
    main()
