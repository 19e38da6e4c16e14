"""Prompts and fleets for the tests of routing."""

import random
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import RouteRequest
from proxy.routing.router import Decision, Router

BLOCK = 16


def ids(count: int, seed: int) -> list[int]:
    """`count` token ids that are all five digits long, so that bytes and tokens are in a fixed ratio."""
    draw = random.Random(seed)
    return [draw.randrange(10_000, 99_999) for _ in range(count)]


def prompt(tokens: Sequence[int]) -> Prompt:
    raw = ",".join(map(str, tokens)).encode()
    return Prompt(Kind.TOKENS, raw, xxh3_64_intdigest(raw))


def request(*prompts: Sequence[int], n: int = 1, salt: str = "") -> RouteRequest:
    return RouteRequest(model="m", n=n, salt=salt, prompts=tuple(prompt(it) for it in prompts))


def router(replicas: int = 4, policy: str = "prefix", capacity: int | None = 1_000_000) -> Router:
    it = Router(policy)
    for replica in range(replicas):
        it.set_replica(replica, key=f"http://10.0.0.{replica}:8000", block_size=BLOCK, capacity_tokens=capacity)
    return it


def ask(
    it: Router, asked: RouteRequest, candidates: Sequence[int] = range(4), now: float = 0.0, model: str = "m"
) -> Decision:
    """Decide and start."""
    decision = it.decide(asked, model, list(candidates), now)
    it.start(decision, now)
    return decision


def at_rest(it: Router) -> bool:
    """No load is left anywhere."""
    loads = [(load.sequences, load.requests, load.uncached) for load in it._loads]
    return it.counters()["in_flight"] == 0 and all(load == (0, 0, 0) for load in loads)
