"""Completions as a reinforcement-learning trainer asks for them, and what an ideal cache would make of them."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from .replica import BLOCK

VOCABULARY = range(3, 380)


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion. `logprobs` are of the chosen tokens; `cached` is what vLLM says it reused of the prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    model: str
    prompt_tokens: int
    cached: int
    replica: str
    route: str


def prompt(seed: int, length: int) -> list[int]:
    """Token ids drawn with `seed`; no two seeds share a block."""
    draw = random.Random(seed)
    return [draw.choice(VOCABULARY) for _ in range(length)]


@asynccontextmanager
async def session(token: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    """As many connections as asked for, and no time limit."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as opened:
        yield opened


def body(model: str, ids: Sequence[int], tokens: int, **more: object) -> dict[str, Any]:
    """Greedy, exactly `tokens` long, with the log-probability of every token."""
    fixed = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True, "n": 1}
    return {"model": model, "prompt": list(ids), "max_tokens": tokens, **fixed, **more}


async def complete(
    client: aiohttp.ClientSession, url: str, model: str, ids: Sequence[int], tokens: int = 16, **more: object
) -> Answer:
    """POST /v1/completions, not streamed; anything but 200 is an AssertionError that shows the answer."""
    async with client.post(f"{url}/v1/completions", json=body(model, ids, tokens, **more)) as response:
        text = await response.text()
        assert response.status == 200, f"{response.status}: {text}"
        answer, headers = json.loads(text), response.headers
    choice, usage = answer["choices"][0], answer["usage"]
    return Answer(
        tokens=tuple(choice["token_ids"]),
        logprobs=tuple(choice["logprobs"]["token_logprobs"]),
        model=answer["model"],
        prompt_tokens=usage["prompt_tokens"],
        cached=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        replica=headers.get("x-lorafleet-replica", ""),
        route=headers.get("x-lorafleet-route", ""),
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """A streamed completion: its tokens and their log-probabilities, and when each event came (time.monotonic())."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    times: tuple[float, ...]

    @property
    def longest_gap(self) -> float:
        """Seconds between two events that follow each other."""
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The events of a server-sent stream up to [DONE], decoded; a stream that ends before it is an AssertionError."""
    async for line in response.content:
        if line.startswith(b"data: "):
            payload = line[len(b"data: ") :].strip()
            if payload == b"[DONE]":
                return
            yield json.loads(payload)
    raise AssertionError("the stream ended without [DONE]")


async def stream(
    client: aiohttp.ClientSession, url: str, model: str, ids: Sequence[int], tokens: int, **more: object
) -> Stream:
    """POST /v1/completions with stream: true, read to the end."""
    got: list[int] = []
    logprobs: list[float] = []
    times: list[float] = []
    request = body(model, ids, tokens, stream=True, **more)
    async with client.post(f"{url}/v1/completions", json=request) as response:
        assert response.status == 200, await response.text()
        async for event in events(response):
            assert "choices" in event, f"an error in the stream: {event}"
            times.append(time.monotonic())
            choice = event["choices"][0]
            got += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    return Stream(tuple(got), tuple(logprobs), tuple(times))


async def gather_limited(limit: int, jobs: Iterable[Any]) -> list[Any]:
    """Awaits the coroutines, `limit` at a time, begun in order; results in order."""
    gate = asyncio.Semaphore(limit)

    async def one(job: Any) -> Any:
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


def endless_cache(prompts: Iterable[Sequence[int]]) -> int:
    """Tokens that a single engine which never evicts would reuse over these prompts, one after the other.

    Counted as vLLM does: whole blocks from the start, and the last prompt token is always computed.
    """
    seen: set[tuple[int, ...]] = set()
    reused = 0
    for ids in prompts:
        blocks = [tuple(ids[: end + BLOCK]) for end in range(0, len(ids) - BLOCK + 1, BLOCK)]
        held = 0
        while held < len(blocks) and blocks[held] in seen:
            held += 1
        reused += min(held, (len(ids) - 1) // BLOCK) * BLOCK
        seen.update(blocks)
    return reused
