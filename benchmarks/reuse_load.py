"""One cell of `benchmarks.reuse`: a workload through one router, over real HTTP, on replicas with empty caches.

Replicas and client share this process, the router has its own. What was reused, computed and where requests went is
read from the replicas themselves; what one endless cache would have reused is worked out afterwards, from the requests
in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import all_cpu_secs, cpu_secs
from benchmarks.offline_fleet import EndlessCache
from benchmarks.offline_workloads import Rollout
from benchmarks.peers import Peer, Running, running
from benchmarks.reuse_adapters import Adapters
from benchmarks.reuse_rows import ANSWER, Row
from proxy.errors import UpstreamError
from proxy.simulator.embed import SimFleet
from proxy.simulator.tokenizer import encode
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint

MAX_TOKENS = 2 * ANSWER
HEADERS = ((b"content-type", b"application/json"),)


@dataclass(slots=True)
class Outcome:
    """Token counts are the replicas' own, `predicted` is what lorafleet expected to be cached (its header).

    Seconds are of this machine. `busy`, `router` and `others` are cores that this process, the router and everything
    else used: with `busy` near 1 the wall time is the benchmark's own, with much of the last it means little.
    """

    peer: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    prefilled: int = 0
    endless: int = 0
    shares: list[int] = field(default_factory=list)
    preemptions: int = 0
    wall: float = 0.0
    busy: float = 0.0
    router: float = 0.0
    others: float = 0.0
    routes: dict[str, int] = field(default_factory=dict)
    predicted: int = 0
    publishes: list[float] = field(default_factory=list)

    @property
    def reuse(self) -> float:
        """The part of all prompt tokens that came from a cache."""
        return self.cached / max(1, self.prompt_tokens)

    @property
    def possible(self) -> float:
        """The part that one endless cache would have reused."""
        return self.endless / max(1, self.prompt_tokens)

    @property
    def ratio(self) -> float:
        """What was reused of what one endless cache would have."""
        return self.cached / max(1, self.endless)

    @property
    def balance(self) -> float:
        """The largest replica's share of the requests over the mean."""
        return max(self.shares) * len(self.shares) / max(1, sum(self.shares))


def as_text(tokens: list[int]) -> str:
    """A prompt of as many printable bytes as there are tokens, equal where they are."""
    return bytes(33 + token % 93 for token in tokens).decode()


class Client:
    """Keeps `concurrency` rollouts going, each turn asked when the answer of the last is there."""

    def __init__(self, row: Row, peer: Peer, router: Running, adapters: Adapters | None) -> None:
        self.outcome = Outcome(peer.name)
        self._row, self._text = row, peer.text
        self._router = router
        self._endpoint = Endpoint(router.address)
        self._transport = LeanTransport()
        self._adapters = adapters
        self._todo = deque(enumerate(row.workload.rollouts))
        self._routes: Counter[str] = Counter()
        self._log: list[tuple[bool, str, Any]] = []
        """Sent (True) and answered (False) prompts in order, for the endless cache."""

    async def run(self) -> None:
        began, before = time.perf_counter(), self._spent()
        await asyncio.gather(*(self._worker() for _ in range(self._row.concurrency)))
        self.outcome.wall = wall = time.perf_counter() - began
        used = [(after - earlier) / wall for after, earlier in zip(self._spent(), before, strict=True)]
        self.outcome.busy, self.outcome.router = used[0], used[1]
        self.outcome.others = max(0.0, used[2] - used[0] - used[1])
        await self._transport.close()
        self.outcome.routes = dict(self._routes)

    def _spent(self) -> tuple[float, float, float]:
        """Processor seconds of this process, of the router, of everything."""
        return cpu_secs(), cpu_secs(self._router.pid), all_cpu_secs()

    async def _worker(self) -> None:
        while self._todo:
            number, rollout = self._todo.popleft()
            if self._adapters is not None:
                await self._adapters.wait(rollout.model, number)
            await self._rollout(number, rollout)

    async def _rollout(self, number: int, rollout: Rollout) -> None:
        prompt: Any = "" if self._text else []
        for turn in rollout.turns:
            prompt = prompt + (as_text(turn.tokens) if self._text else turn.tokens)
            answer = await self._ask(number, rollout.model, prompt)
            if answer is None:
                return
            self._log.append((False, rollout.model, prompt + answer[:-1]))
            prompt = prompt + answer

    async def _ask(self, seed: int, model: str, prompt: Any) -> Any:
        """The answer as text or ids; None when it failed."""
        self._log.append((True, model, prompt))
        fields = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "n": 1, "temperature": 1.0}
        fields |= {"return_token_ids": True, "logprobs": 0, "seed": seed}
        body = json.dumps(fields).encode()
        self.outcome.requests += 1
        try:
            response = await self._transport.request(
                self._endpoint, "POST", "/v1/completions", headers=HEADERS, body=body
            )
            raw = await response.read()
        except UpstreamError:
            self.outcome.failed += 1
            return None
        if response.status != 200:
            self.outcome.failed += 1
            return None
        for name, value in response.headers:
            if name == b"x-lorafleet-route":
                self._routes[value.decode()] += 1
            elif name == b"x-lorafleet-predicted-cached-tokens":
                self.outcome.predicted += int(value)
        choice = json.loads(raw)["choices"][0]
        return choice["text"] if self._text else choice["token_ids"]

    def endless(self) -> int:
        """Prompt tokens that one cache which never evicts would have reused."""
        cache, reused = EndlessCache(), 0
        for sent, model, prompt in self._log:
            tokens = encode(prompt) if isinstance(prompt, str) else prompt
            if sent:
                reused += cache.lookup(model, tokens)
            else:
                cache.add(model, tokens)
        return reused


def fleet(row: Row) -> SimFleet:
    """The row's replicas."""
    each = [{"speed": row.faster * (0.5 if row.slow and index == 0 else 1.0)} for index in range(row.replicas)]
    return SimFleet(
        each=each,
        capacity_blocks=row.capacity,
        prefill_tps=row.speed.prefill_tps,
        decode_tps=row.speed.decode_tps,
        decode_slowdown=row.speed.slowdown,
        natural_tokens=ANSWER,
        max_loras=16,
    )


def merged(rounds: list[Outcome]) -> Outcome:
    """Several runs of one cell as one: counts add up, the wall time is the mean."""
    whole = Outcome(
        rounds[0].peer, shares=[sum(counts) for counts in zip(*(each.shares for each in rounds), strict=True)]
    )
    for each in rounds:
        for name in (
            "requests",
            "failed",
            "prompt_tokens",
            "cached",
            "prefilled",
            "endless",
            "preemptions",
            "predicted",
        ):
            setattr(whole, name, getattr(whole, name) + getattr(each, name))
        whole.wall += each.wall / len(rounds)
        whole.busy = max(whole.busy, each.busy)
        whole.router = max(whole.router, each.router)
        whole.others = max(whole.others, each.others)
        whole.publishes += each.publishes
        whole.routes = dict(Counter(whole.routes) + Counter(each.routes))
    return whole


async def measure(row: Row, peer: Peer) -> Outcome:
    """Run the row through a fresh router over fresh replicas."""
    with tempfile.TemporaryDirectory(prefix="reuse-") as scratch:
        async with fleet(row) as replicas, running(peer, replicas.urls) as router:
            adapters = None
            if row.publish:
                targets = [router.address] if peer.broadcasts else replicas.urls
                adapters = Adapters(row.workload, Path(scratch), targets)
                await adapters.begin()
            client = Client(row, peer, router, adapters)
            await client.run()
            outcome = client.outcome
            if adapters is not None:
                outcome.publishes = await adapters.end()
            for replica in replicas.replicas:
                counters = replica.replica.engine.counters
                outcome.shares.append(replica.calls.get("completion", 0))
                outcome.prompt_tokens += counters.queries
                outcome.cached += counters.hits
                outcome.prefilled += counters.prefilled
                outcome.preemptions += counters.preemptions
    outcome.endless = client.endless()
    return outcome
