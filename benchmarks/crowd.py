"""Thousands of streams at once for minutes, then bodies of a million tokens: memory and stalls of the proxy.

    python -m benchmarks.crowd [--streams 3000] [--minutes 3] [--json out/crowd.json]

The replicas are simulated, slow enough that every stream lasts for many seconds and a new one takes
its place at once. A prober asks /health every 10 ms all the while: how long it waits is how long the event loop was
away from everybody. Every stream must end with `data: [DONE]`. Exit status 1 if one did not, or if anything is in
flight at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import percentile, slope
from benchmarks.machine import facts, line
from benchmarks.served import Served, serving
from proxy.simulator.process import SimProcess
from trainer_client import FleetClient

REPLICAS = 2
TOKENS_A_STREAM = 24
STEP_SECS = 1.0
MILLION = 1_000_000


@dataclass(slots=True)
class Seen:
    """What happened to the streams, how long the prober waited (ms), and memory by time (s, MB)."""

    whole: int = 0
    broken: int = 0
    open: int = 0
    most_open: int = 0
    waits: list[float] = field(default_factory=list)
    rss_mb: list[tuple[float, float]] = field(default_factory=list)


class Crowd:
    """The clients, all in this event loop."""

    def __init__(self, port: int, token_ids: int) -> None:
        self._port = port
        self._token_ids = token_ids
        self._stop = False
        self.seen = Seen()

    async def stream(self, number: int) -> None:
        """One client: a stream, then the next, until the end."""
        turn = 0
        while not self._stop:
            prompt = [number + 3, *range(turn, turn + self._token_ids)]
            fields = {"model": "base", "prompt": prompt, "max_tokens": TOKENS_A_STREAM, "stream": True}
            seen, turn = self.seen, turn + 1
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                seen.open += 1
                seen.most_open = max(seen.most_open, seen.open)
                try:
                    writer.write(post(json.dumps(fields).encode()))
                    ended = b"data: [DONE]" in (await reader.read())[-64:]
                finally:
                    seen.open -= 1
                    writer.close()
            except OSError:
                ended = False
            seen.whole += ended
            seen.broken += not ended

    def stop(self) -> None:
        self._stop = True


def post(body: bytes) -> bytes:
    """A completion request on a connection of its own."""
    lines = b"host: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d" % len(body)
    return b"POST /v1/completions HTTP/1.1\r\n%b\r\n\r\n%b" % (lines, body)


async def crowded(served: Served, streams: int, secs: float) -> Seen:
    """Hold `streams` streams open for `secs` seconds, then let them end."""
    crowd = Crowd(port_of(served), 40)
    clients = []
    for number in range(streams):
        clients.append(asyncio.create_task(crowd.stream(number)))
        await asyncio.sleep(STEP_SECS * TOKENS_A_STREAM / streams / 2)  # not all at the same moment
    prober = Prober(served, secs)
    probing = asyncio.create_task(prober.run())
    until = time.monotonic() + secs
    while time.monotonic() < until:
        crowd.seen.rss_mb.append((time.monotonic(), served.rss() / 1e6))
        await asyncio.sleep(2.0)
    crowd.stop()
    await asyncio.gather(*clients, probing)
    crowd.seen.waits = prober.waits
    return crowd.seen


MILLIONS = """
import http.client, json, random, sys
draw = random.Random(1)
prompt = [draw.randrange(150000) for _ in range(int(sys.argv[2]))]
body = json.dumps({"model": "base", "max_tokens": 1, "prompt": prompt})
for _ in range(int(sys.argv[3])):
    link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
    link.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = link.getresponse()
    answer.read()
    print(answer.status, flush=True)
"""


async def millions(served: Served, count: int) -> tuple[Seen, float]:
    """Bodies of a million tokens, one after the other; and the seconds that it took."""
    prober = Prober(served, count * 1.0)
    probing = asyncio.create_task(prober.run())
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", MILLIONS, str(port_of(served)), str(MILLION), str(count), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    took = time.monotonic() - began
    await probing
    whole = said.split().count(b"200")
    return Seen(whole=whole, broken=count - whole, waits=prober.waits), took


PROBE = """
import http.client, sys, time
link = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.perf_counter()
    link.request("GET", "/health")
    link.getresponse().read()
    print((time.perf_counter() - began) * 1e3, flush=True)
    time.sleep(0.01)
"""


class Prober:
    """A process that asks /health every 10 ms; `waits` are ms."""

    def __init__(self, served: Served, secs: float) -> None:
        self._command = [sys.executable, "-c", PROBE, str(port_of(served)), str(secs)]
        self.waits: list[float] = []

    async def run(self) -> None:
        process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.PIPE)
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        self.waits = [float(row) for row in said.split()]


def port_of(served: Served) -> int:
    return int(served.url.rpartition(":")[2])


async def run(streams: int, minutes: float, bodies: int) -> dict[str, Any]:
    token = secrets.token_hex(8)
    speeds: dict[str, Any] = {"decode_tps": 1 / STEP_SECS, "max_num_seqs": 4096}
    speeds |= {"capacity_blocks": 1 << 17, "max_model_len": 1 << 21}
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(SimProcess(api_key=token, **speeds)) for _ in range(REPLICAS)]
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = stack.enter_context(serving([replica.url for replica in replicas], scratch, token))
        crowd = await crowded(served, streams, minutes * 60)
        rest = await asyncio.to_thread(_in_flight, served)
        big, took = await millions(served, bodies)
        return {
            **facts("lorafleet", "uvloop", "httptools"),
            "most streams at once": crowd.most_open,
            "streams that ended": crowd.whole,
            "streams that broke": crowd.broken,
            "in flight at rest": rest,
            "rss MB, first and last": [round(crowd.rss_mb[0][1], 1), round(crowd.rss_mb[-1][1], 1)],
            "rss MB, second half slope a minute": round(slope(crowd.rss_mb[len(crowd.rss_mb) // 2 :]) * 60, 2),
            "health ms in the crowd, p50 p99 max": [round(percentile(crowd.waits, q), 1) for q in (0.5, 0.99, 1.0)],
            "bodies of a million tokens": big.whole,
            "of them broken": big.broken,
            "seconds a body": round(took / bodies, 2),
            "health ms meanwhile, p50 p99 max": [round(percentile(big.waits, q), 1) for q in (0.5, 0.99, 1.0)],
            "rss MB afterwards": round(served.rss() / 1e6, 1),
        }


def _in_flight(served: Served) -> int:
    with FleetClient(served.url, api_key="") as client:
        return int(sum(replica["in_flight"] for replica in client.status()["replicas"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--bodies", type=int, default=8)
    parser.add_argument("--json", type=Path, default=Path("out/crowd.json"))
    options = parser.parse_args()
    found = asyncio.run(run(options.streams, options.minutes, options.bodies))
    table = Table("what", "measured", title=line(facts("lorafleet")))
    for name, value in found.items():
        table.add_row(name, str(value))
    Console(width=110).print(table)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["streams that broke"] or found["in flight at rest"] or found["of them broken"] else 0)


if __name__ == "__main__":
    main()
