"""`lorafleet demo`: the main job on an embedded fleet of simulated replicas, and what came of it.

The same GRPO-shaped load (8 rollouts a prompt, many prompts at a time, a publish every few prompts) goes through two
proxies, one routing by prefix and one round robin, each over three simulated replicas of its own. Every answer is
checked: the simulator's tokens are a function of the weights that made them, so an answer of other weights than its
policy's name says is seen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import uvicorn

from proxy.config import Options, build
from proxy.server import bind
from proxy.simulator.adapters import write_adapter
from proxy.simulator.embed import SimFleet
from proxy.simulator.weights import expected_tokens
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint
from proxy.web.app import App
from proxy.web.client_connection import ClientConnection
from trainer_client import AdapterPublisher, FleetClient

REPLICAS = 3
PUBLISHES = 10
GROUP = 8
PROMPTS_PER_VERSION = 12
PROMPT_TOKENS = 600
SHARED_TOKENS = 48
OUTPUT_TOKENS = 16
CONCURRENCY = 48
SPEED: dict[str, Any] = {"prefill_tps": 12_000.0, "decode_tps": 400.0, "decode_slowdown": 0.02, "capacity_blocks": 8192}


@dataclass(slots=True)
class Tally:
    """What one run came to. Tokens are prompt tokens as the replicas counted them."""

    policy: str
    answers: int = 0
    wrong: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_secs: float = 0.0
    syncs: list[float] = field(default_factory=list)
    shares: list[int] = field(default_factory=list)
    address: str = ""

    @property
    def reuse(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def endless_cache() -> float:
    """What one endless cache would reuse of this load: all of a prompt's blocks but in its first rollout; the shared
    preamble is prefilled once a version. Whole blocks of 16 tokens, and never a prompt's last token."""
    whole = (PROMPT_TOKENS - 1) // 16 * 16
    prompts = PROMPTS_PER_VERSION
    first = (prompts - 1) * (SHARED_TOKENS // 16 * 16)
    return (first + prompts * (GROUP - 1) * whole) / (prompts * GROUP * PROMPT_TOKENS)


class Rollouts:
    """The trainer's rollout worker: groups of requests under the newest version, checked as they come back."""

    def __init__(self, address: str, tally: Tally, step: Callable[[], None]) -> None:
        self._endpoint = Endpoint(address)
        self._transport = LeanTransport()
        self._tally = tally
        self._step = step
        self._room = asyncio.Semaphore(CONCURRENCY)
        self._random = random.Random(7)

    async def version(self, model: str, weights: str) -> None:
        """All groups of one policy version."""
        shared = [self._random.randrange(3, 30_000) for _ in range(SHARED_TOKENS)]
        jobs: list[Coroutine[Any, Any, None]] = []
        for _ in range(PROMPTS_PER_VERSION):
            own = [self._random.randrange(3, 30_000) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
            jobs.extend(self._rollout(model, weights, shared + own, seed) for seed in range(GROUP))
        await asyncio.gather(*jobs)

    async def _rollout(self, model: str, weights: str, prompt: list[int], seed: int) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "n": 1,
            "seed": seed,
            "temperature": 1.0,
            "return_token_ids": True,
        }
        async with self._room:
            response = await self._transport.request(
                self._endpoint,
                "POST",
                "/v1/completions",
                headers=((b"content-type", b"application/json"),),
                body=json.dumps(body).encode(),
            )
            raw = await response.read()
        tally = self._tally
        self._step()
        if response.status != 200:
            tally.failed += 1
            return
        answer = json.loads(raw)
        tally.answers += 1
        expected = expected_tokens(weights, prompt, OUTPUT_TOKENS, seed)
        tally.wrong += answer["choices"][0]["token_ids"] != expected or answer["model"] != model
        usage = answer["usage"]
        tally.prompt_tokens += usage["prompt_tokens"]
        tally.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]

    async def close(self) -> None:
        await self._transport.close()


@contextlib.asynccontextmanager
async def serving(urls: list[str], policy: str, state_dir: Path, root: Path) -> AsyncIterator[str]:
    """A proxy over `urls` in this event loop; gives its address."""
    options = Options(
        port=0, policy=policy, pause="lazy", state_dir=str(state_dir), adapter_root=[str(root)], log_level="error"
    )
    environment = {key: value for key, value in os.environ.items() if key != "HF_TOKEN"}  # nobody here needs it
    settings = build(urls, options, environment=environment)
    sock = bind(settings.host, settings.port)
    server = uvicorn.Server(
        uvicorn.Config(
            App(settings), http=ClientConnection, ws="none", log_config=None, access_log=False, lifespan="on"
        )
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    task = asyncio.create_task(server._serve(sockets=[sock]))
    address = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        await asyncio.to_thread(_wait_ready, address)
        yield address
    finally:
        server.should_exit = True
        await task


def _wait_ready(address: str) -> None:
    with FleetClient(address) as client:
        client.wait_ready(timeout=30)


async def run(
    policy: str, where: Path, step: Callable[[str], None], over: Callable[[Tally], Awaitable[None]] | None = None
) -> Tally:
    """One side of the comparison; `over` is called with its tally while the fleet is still up."""
    tally = Tally(policy)
    root = where / policy
    (root / "adapters").mkdir(parents=True)
    async with (
        SimFleet(REPLICAS, **SPEED) as fleet,
        serving(fleet.urls, policy, root / "state", root / "adapters") as address,
    ):
        tally.address = address
        rollouts = Rollouts(address, tally, lambda: step("rollouts"))
        began = time.perf_counter()
        with FleetClient(address) as client, AdapterPublisher(root / "adapters", client=client) as publisher:
            running: asyncio.Task[None] | None = None
            for number in range(PUBLISHES):
                source = root / f"trained-{number}"
                write_adapter(source, seed=1000 + number)
                published = await asyncio.to_thread(publisher.publish, source)
                tally.syncs.append(published.seconds.load)
                step("publishes")
                weights = fleet.replicas[0].weights(published.name)
                assert weights is not None
                if running is not None:
                    await running
                running = asyncio.create_task(rollouts.version(published.name, weights))
            if running is not None:
                await running
        tally.wall_secs = time.perf_counter() - began
        tally.shares = [replica.calls.get("completion", 0) for replica in fleet.replicas]
        await rollouts.close()
        if over is not None:
            await over(tally)
    return tally


def rows(prefix: Tally, other: Tally) -> list[tuple[str, str, str]]:
    """The table: what, by prefix, round robin."""

    def sync(tally: Tally) -> str:
        ordered = sorted(tally.syncs)
        return f"{ordered[len(ordered) // 2] * 1000:.0f} ms (longest {ordered[-1] * 1000:.0f} ms)"

    def pair(name: str, show: Callable[[Tally], Any]) -> tuple[str, str, str]:
        return (name, str(show(prefix)), str(show(other)))

    return [
        pair("completions answered", lambda t: t.answers),
        pair("wrong answers (other weights than the name says)", lambda t: t.wrong),
        pair("failed completions", lambda t: t.failed),
        pair(f"prompt tokens reused (one endless cache: {endless_cache():.1%})", lambda t: f"{t.reuse:.1%}"),
        pair("prompt tokens prefilled", lambda t: f"{t.prompt_tokens - t.cached_tokens:,}"),
        pair("completions per replica", lambda t: " / ".join(map(str, t.shares))),
        pair("from rename to usable everywhere, median", sync),
        pair("wall clock", lambda t: f"{t.wall_secs:.1f} s"),
    ]


class Audience(Protocol):
    """Who watches; see `proxy.demo_view.Show`."""

    def begin(self, publishes: int, rollouts: int) -> None: ...

    def step(self, side: str, what: str) -> None: ...

    def stop(self) -> None: ...

    def table(self, rows: list[tuple[str, str, str]]) -> None: ...

    def address(self, address: str, *, up: bool) -> None: ...


async def main(show: Audience, *, keep: bool) -> int:
    """Run both sides and show the comparison. Returns the exit code: 0 when no answer was wrong and none failed."""
    with tempfile.TemporaryDirectory(prefix="lorafleet-demo-") as where:
        show.begin(PUBLISHES, PUBLISHES * PROMPTS_PER_VERSION * GROUP)
        other = await run("round_robin", Path(where), lambda what: show.step("round_robin", what))

        async def over(prefix: Tally) -> None:
            show.stop()
            show.table(rows(prefix, other))
            show.address(prefix.address, up=keep)
            if keep:
                await asyncio.Event().wait()

        prefix = await run("prefix", Path(where), lambda what: show.step("prefix", what), over)
        return 0 if not any((prefix.wrong, other.wrong, prefix.failed, other.failed)) else 1
