"""Ten minutes of training traffic with a publish every 5 s, a kill -9 every 20 s and clients that leave.

    python -m benchmarks.soak [--minutes 10] [--replicas 4] [--json out/soak.json]

`lorafleet serve` as a process in front of simulated replicas, each a process that demands a token. Groups of eight
rollouts (some as one request with n of 8, or with eight prompts) ask for the newest version by its name, for the one
before it, and for `latest`; half of them stream, one in twenty leaves in the middle. `AdapterPublisher` publishes and
unloads all the while. In turn, each replica is killed and started again at its address, holding nothing. An answer is
checked, token by token, against the weights that its name and digest stand for. A stream that had begun on a killed
replica cannot be continued: it is broken off, counted as cut, and asked for again; any other completion without a whole
answer is a failure.

Exit status 1 if a completion failed, an answer was wrong, a publish failed, an error was logged, or anything was
still held at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts, line
from benchmarks.served import Served, serving
from benchmarks.soak_report import Course, at_rest, failed, report_of, rows_of
from benchmarks.soak_rollouts import Rollouts, Tally
from benchmarks.soak_versions import NAME, Versions
from proxy.simulator.adapters import write_adapter
from proxy.simulator.process import SimProcess
from trainer_client import AdapterPublisher, FleetClient
from trainer_client.errors import FleetError, PublishError

SEED = 11
GROUPS = 16
STALENESS = 2
PUBLISH_SECS, RESTART_SECS, DOWN_SECS, LEAVING = 5.0, 20.0, 2.0, 0.05
SAMPLE_SECS = 2.0
REST_SECS = 20.0
REPLICA: dict[str, Any] = {
    "prefill_tps": 12_000.0,
    "decode_tps": 60.0,
    "decode_slowdown": 0.01,
    "capacity_blocks": 2048,
    "max_loras": STALENESS + 2,
    "require_token_everywhere": True,
}


class Soak:
    """One run: the replicas, the proxy, and those who use and kill them."""

    def __init__(self, proxy: Served, replicas: list[SimProcess], token: str, scratch: Path, minutes: float) -> None:
        self.course = Course()
        self._proxy, self._replicas, self._scratch = proxy, replicas, scratch
        self._versions = Versions(scratch / "adapters")
        self._kills: dict[int, float] = {}
        self._secs = minutes * 60
        hidden = [token.encode(), *(f":{replica.port}".encode() for replica in replicas)]
        self._rollouts = Rollouts(proxy.url, self._versions, self._kills, hidden, SEED, LEAVING)

    async def run(self) -> Tally:
        """All of it; returns when nothing is in flight any more, or should not be."""
        with AdapterPublisher(
            self._scratch / "adapters", NAME, url=self._proxy.url, max_staleness=STALENESS
        ) as publisher:
            publisher.start_run()
            await self._publish(publisher, 0)
            began, spent = time.monotonic(), self._proxy.cpu_secs()
            self.course.samples.append((0.0, self._proxy.rss(), self._proxy.descriptors()))
            others = [
                asyncio.create_task(task)
                for task in (self._publishing(publisher), self._killing(), self._sampling(began), self._lagging())
            ]
            rollouts = asyncio.create_task(self._rollouts.run(GROUPS))
            done, _ = await asyncio.wait([rollouts, *others], timeout=self._secs, return_when=asyncio.FIRST_COMPLETED)
            for task in done:  # none should be: this raises what went wrong in it
                task.result()
            self._rollouts.stop()
            for task in others[:2]:
                task.cancel()
            await asyncio.gather(*others[:2], rollouts, return_exceptions=True)
            rollouts.result()
            self.course.cpu = (self._proxy.cpu_secs() - spent) / (time.monotonic() - began)
            self.course.rest = await self._rest()
            for task in others[2:]:
                task.cancel()
            self.course.samples.append((time.monotonic() - began, self._proxy.rss(), self._proxy.descriptors()))
        return self._rollouts.tally

    async def _publishing(self, publisher: AdapterPublisher) -> None:
        draw, number = random.Random(SEED), 1
        while True:
            await asyncio.sleep(PUBLISH_SECS * draw.uniform(0.9, 1.1))
            # A publish that has begun is waited for, also when this task is told to end.
            await asyncio.shield(self._publish(publisher, number))
            number += 1

    async def _publish(self, publisher: AdapterPublisher, number: int) -> None:
        source = self._scratch / f"trained-{number % 2}"
        await asyncio.to_thread(write_adapter, source, 1000 + number)
        try:
            published = await asyncio.to_thread(publisher.publish, source)
        except (PublishError, FleetError) as error:
            self.course.refused.append(str(error))
            return
        self._versions.remember(published.version)
        self._versions.seen(published.version)
        self.course.publishes.append(published.seconds.load)
        self.course.warnings += published.warnings

    async def _killing(self) -> None:
        while True:
            await asyncio.sleep(RESTART_SECS - DOWN_SECS)
            index = self.course.restarts % len(self._replicas)
            await asyncio.shield(self._restart(index))
            self.course.restarts += 1

    async def _restart(self, index: int) -> None:
        old = self._replicas[index]
        self._kills[index] = time.monotonic()
        old.kill()
        await asyncio.sleep(DOWN_SECS)
        self._replicas[index] = await asyncio.to_thread(old.restarted)
        began = time.monotonic()
        with FleetClient(self._proxy.url, api_key="") as client:
            while True:
                view = await asyncio.to_thread(client.status)
                if view["replicas"][index]["state"] == "ready":
                    break
                await asyncio.sleep(0.05)
        self.course.back.append(time.monotonic() - began)

    async def _sampling(self, began: float) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECS)
            self.course.samples.append((time.monotonic() - began, self._proxy.rss(), self._proxy.descriptors()))

    async def _lagging(self) -> None:
        """How late this process itself is: no gap between tokens can be told apart from that."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.05)
            self.course.lag = max(self.course.lag, time.monotonic() - began - 0.05)

    async def _rest(self) -> dict[str, Any]:
        """What is still held when nobody asks for anything; waits until it is nothing, for so long."""
        deadline = time.monotonic() + REST_SECS
        with FleetClient(self._proxy.url, api_key="") as client:
            async with aiohttp.ClientSession() as http:
                while True:
                    view = await asyncio.to_thread(client.status)
                    found = at_rest(view, [await _state(http, replica.url) for replica in self._replicas])
                    if not any(found.values()) or time.monotonic() > deadline:
                        return found
                    await asyncio.sleep(0.2)


async def _state(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with http.get(f"{url}/_sim/state") as response:
        state: dict[str, Any] = await response.json()
        return state


def measure(minutes: float, replicas: int) -> dict[str, Any]:
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        scratch = Path(directory)
        (scratch / "adapters").mkdir()
        running: list[SimProcess] = []
        try:
            # One after the other, so that those that did start are ended when one does not.
            running.extend(SimProcess(api_key=token, **REPLICA) for _ in range(replicas))
            urls = [replica.url for replica in running]
            flags = ["--pause", "lazy", "--adapter-root", str(scratch / "adapters")]
            with serving(urls, scratch / "proxy", token, *flags) as proxy:
                soak = Soak(proxy, running, token, scratch, minutes)
                tally = asyncio.run(soak.run())
                return report_of(tally, soak.course, minutes, proxy.lines())
        finally:
            for replica in running:
                replica.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--json", type=Path, default=Path("out/soak.json"), help="where the numbers go as well")
    options = parser.parse_args()
    report = measure(options.minutes, options.replicas)
    machine = facts("lorafleet", "aiohttp", "uvloop", "httptools")
    table = Table(title=f"soak, {options.minutes:g} minutes, {options.replicas} replicas, {GROUPS * 8} in flight")
    table.add_column("what", no_wrap=True)
    table.add_column("measured", justify="right")
    for name, value in rows_of(report):
        table.add_row(name, value)
    Console(width=120).print(table)
    print(line(machine))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    whole = {"machine": machine, "minutes": options.minutes, "replicas": options.replicas, "seed": SEED, **report}
    options.json.write_text(json.dumps(whole, indent=1) + "\n")
    why = failed(report)
    if why:
        sys.exit("; ".join(why))


if __name__ == "__main__":
    main()
