"""The soak's clients: groups of eight rollouts, streamed and not, some of which leave; every answer is checked.

Most groups are eight requests with one prompt; some are one request with `n` of 8, or one with eight prompts.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.figures import longest_gap
from benchmarks.soak_versions import LATEST, Versions
from proxy.simulator.weights import expected_tokens

GROUP = 8
SHARED_TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS = 48, (160, 640), (16, 160)
CUT_SECS = 5.0
"""A stream that breaks off so soon after its replica was killed was cut by that."""

ANSWER_SECS = 120.0


@dataclass(slots=True)
class Tally:
    """Counts of completions; times in seconds."""

    answered: int = 0
    streamed: int = 0
    batches: int = 0
    left: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    gap_of_cut: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `n` answers to each prompt. `leave`: the part of the answer after which its client goes away, None
    to stay."""

    model: str
    prompts: list[list[int]]
    n: int
    seed: int
    tokens: int
    stream: bool
    leave: float | None
    floor: int

    @property
    def choices(self) -> int:
        """How many answers it gets."""
        return len(self.prompts) * self.n

    def body(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": self.prompts[0] if len(self.prompts) == 1 else self.prompts,
            "n": self.n,
            "max_tokens": self.tokens,
            "seed": self.seed,
            "temperature": 1.0,
            "stream": self.stream,
            "return_token_ids": True,
        }

    def expected(self, weights: str, choice: int) -> list[int]:
        """The tokens of one of its answers under these weights."""
        prompt, sample = divmod(choice, self.n)
        return expected_tokens(weights, self.prompts[prompt], self.tokens, self.seed + sample)


@dataclass(slots=True)
class Heard:
    """What came of an answer until now: tokens by choice, and the choices that are finished."""

    status: int = 0
    replicas: tuple[int, ...] = ()
    digest: str | None = None
    model: str | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    times: list[float] = field(default_factory=list)


class Left(Exception):
    """The client went away, as it was meant to."""


class Rollouts:
    """Keeps `groups` groups in flight until `stop`. `kills` is the time of each replica's last kill, `secrets` is what
    no client may ever see (tokens, addresses of replicas)."""

    def __init__(
        self, url: str, versions: Versions, kills: dict[int, float], secrets: list[bytes], seed: int, leaving: float
    ) -> None:
        self.tally = Tally()
        self._url, self._versions, self._kills, self._secrets = url, versions, kills, secrets
        self._random = random.Random(seed)
        self._leaving = leaving
        self._shared = [self._random.randrange(3, 30_000) for _ in range(SHARED_TOKENS)]
        self._going = True
        self._http: aiohttp.ClientSession | None = None

    def stop(self) -> None:
        """Begin no more groups."""
        self._going = False

    async def run(self, groups: int) -> None:
        """Returns when the last answer of the last group is there."""
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(ANSWER_SECS)) as self._http:
            await asyncio.gather(*(self._groups(number / groups) for number in range(groups)))

    async def _groups(self, delay: float) -> None:
        await asyncio.sleep(delay)
        while self._going:
            await asyncio.gather(*(self._rollout(ask) for ask in self._group()))

    def _group(self) -> list[Ask]:
        draw, versions = self._random, self._versions
        model = draw.choices([versions.ask(), LATEST, versions.ask(back=1)], [45, 45, 10])[0]
        prompts, n, requests = draw.choices([(1, 1, GROUP), (1, GROUP, 1), (GROUP, 1, 1)], [80, 10, 10])[0]
        same = [self._prompt() for _ in range(prompts)]
        return [
            Ask(
                model,
                same,
                n,
                seed,
                draw.randrange(*OUTPUT_TOKENS),
                draw.random() < 0.5,
                draw.uniform(0.05, 0.8) if draw.random() < self._leaving else None,
                versions.committed,
            )
            for seed in range(requests)
        ]

    def _prompt(self) -> list[int]:
        draw = self._random
        return self._shared + [draw.randrange(3, 30_000) for _ in range(draw.randrange(*PROMPT_TOKENS) - SHARED_TOKENS)]

    async def _rollout(self, ask: Ask) -> None:
        """Ask until there is a whole answer: only a stream that a kill has cut is asked for again."""
        tally = self.tally
        while True:
            heard, began = Heard(), time.perf_counter()
            try:
                await self._ask(ask, heard)
            except Left:
                tally.left += 1
                self._check(ask, heard)
                return
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                if not self._was_cut(heard):
                    tally.failed[f"{type(error).__name__} (status {heard.status}, {len(heard.tokens)} begun)"] += 1
                    return
                tally.cut += 1
                tally.gap_of_cut = max(tally.gap_of_cut, longest_gap([*heard.times, time.perf_counter()]))
                self._check(ask, heard)
                continue
            if heard.status == 200:
                self._answered(ask, heard, time.perf_counter() - began, began)
            return

    def _was_cut(self, heard: Heard) -> bool:
        """Whether bytes of the answer had come from a replica that was killed just now."""
        killed = [self._kills[replica] for replica in heard.replicas if replica in self._kills]
        return heard.status == 200 and bool(killed) and time.monotonic() - max(killed) < CUT_SECS

    async def _ask(self, ask: Ask, heard: Heard) -> None:
        if ask.leave is not None and not ask.stream:
            try:
                async with asyncio.timeout(ask.leave):
                    await self._exchange(ask, heard)
            except TimeoutError:
                raise Left from None
        else:
            await self._exchange(ask, heard)

    async def _exchange(self, ask: Ask, heard: Heard) -> None:
        assert self._http is not None
        async with self._http.post(f"{self._url}/v1/completions", json=ask.body()) as response:
            heard.status = response.status
            heard.replicas = tuple(map(int, filter(None, response.headers.get("x-lorafleet-replica", "").split(","))))
            heard.digest = response.headers.get("x-lorafleet-digest")
            self._look_for_secrets(repr(response.raw_headers).encode())
            if response.status != 200:
                raw = await response.read()
                self._look_for_secrets(raw)
                self.tally.failed[f"{response.status} {raw[:200].decode(errors='replace')}"] += 1
            elif ask.stream:
                await self._events(response, ask, heard)
            else:
                raw = await response.read()
                self._look_for_secrets(raw)
                answer = json.loads(raw)
                heard.model = answer["model"]
                for choice in answer["choices"]:
                    self._take(choice, heard)

    async def _events(self, response: aiohttp.ClientResponse, ask: Ask, heard: Heard) -> None:
        done = False
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            self._look_for_secrets(line)
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            event = json.loads(line[6:])
            heard.times.append(time.perf_counter())
            heard.model = event["model"]
            for choice in event["choices"]:
                self._take(choice, heard)
            come = sum(map(len, heard.tokens.values()))
            if ask.leave is not None and come >= ask.leave * ask.tokens * ask.choices:
                response.close()
                raise Left
        if not done:
            raise ValueError("a stream without its end")

    def _take(self, choice: dict[str, Any], heard: Heard) -> None:
        heard.tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
        if choice["finish_reason"] is not None:
            heard.finished.add(choice["index"])

    def _look_for_secrets(self, raw: bytes) -> None:
        for secret in self._secrets:
            if secret in raw:
                self.tally.failed["a token or a replica's address in an answer"] += 1

    def _answered(self, ask: Ask, heard: Heard, secs: float, began: float) -> None:
        tally = self.tally
        if heard.finished != set(range(ask.choices)):
            tally.failed["an answer without its end"] += 1
            return
        tally.answered += 1
        tally.tokens += sum(map(len, heard.tokens.values()))
        tally.batches += len(ask.prompts) > 1
        tally.names["latest" if ask.model == LATEST else "version"] += 1
        self._check(ask, heard)
        if ask.stream:
            tally.streamed += 1
            tally.first.append(heard.times[0] - began)
            if ask.choices == 1:  # others are several streams in one
                tally.gaps.append(longest_gap(heard.times))
        else:
            tally.whole.append(secs)

    def _check(self, ask: Ask, heard: Heard) -> None:
        """Whole or broken off: what came must be of the weights that the name means."""
        if heard.model is None:
            return
        versions, wrong = self._versions, self.tally.wrong
        version = versions.meaning(ask.model, heard.model, ask.floor)
        if isinstance(version, str):
            wrong.append(version)
            return
        weights, digest = versions.remember(version)
        versions.seen(version)
        for choice, tokens in heard.tokens.items():
            expected = ask.expected(weights, choice)
            if tokens != (expected if choice in heard.finished else expected[: len(tokens)]):
                wrong.append(f"{ask.model}, answered as {heard.model}: tokens of other weights")
        if heard.digest != digest:
            wrong.append(f"{ask.model}, answered as {heard.model}: digest {heard.digest} instead of {digest}")
