"""An engine's own events find the prompts that the router hashes, and evictions are forgotten."""

from __future__ import annotations

import json
import random

from proxy.routing.request import parse
from proxy.routing.router import Router

BLOCK = 16


def request(ids: list[int], model: str = "m", **more: object) -> bytes:
    return json.dumps({"model": model, "prompt": ids, **more}).encode()


def predicted(router: Router, ids: list[int], model: str = "m", **more: object) -> tuple[int, int]:
    """(replica, predicted cached tokens) of one decision."""
    decision = router.decide(parse("/v1/completions", request(ids, model, **more)), model, [0, 1], 0.0)
    return decision.replica, decision.cached_tokens


def two() -> Router:
    router = Router()
    for replica in (0, 1):
        router.set_replica(replica, key=f"http://r{replica}", block_size=BLOCK, capacity_tokens=65536)
    return router


def store(router: Router, replica: int, ids: list[int], model: str = "m", salt: str = "") -> list[int]:
    hashes = [hash((model, salt, tuple(ids[: i + BLOCK]))) for i in range(0, len(ids), BLOCK)]
    router.feed.stored(replica, model, salt, hashes, None, ids, BLOCK)
    return hashes


def test_a_prompt_goes_where_an_engine_said_it_has_it() -> None:
    for replica in (0, 1):
        router, ids = two(), random.Random(1).sample(range(3, 30_000), 640)
        store(router, replica, ids)
        got, cached = predicted(router, ids)
        assert got == replica
        assert 560 <= cached < 640


def test_blocks_that_follow_others_come_in_pieces() -> None:
    router, ids = two(), random.Random(2).sample(range(3, 30_000), 640)
    hashes = store(router, 1, ids[:320])
    more = [hash(("m", i)) for i in range(320, 640, BLOCK)]
    router.feed.stored(1, "m", "", more, hashes[-1], ids[320:], BLOCK)
    got, cached = predicted(router, ids)
    assert got == 1
    assert cached >= 560


def test_what_an_engine_evicted_is_not_counted_on() -> None:
    router, ids = two(), random.Random(3).sample(range(3, 30_000), 640)
    hashes = store(router, 1, ids)
    router.feed.removed(1, hashes[10:][::-1])
    assert predicted(router, ids)[1] <= 160
    assert router.feed.count(1) == 10


def test_a_cleared_cache_holds_nothing() -> None:
    router, ids = two(), random.Random(4).sample(range(3, 30_000), 320)
    store(router, 1, ids)
    router.feed.cleared(1)
    assert predicted(router, ids)[1] == 0


def test_names_and_salts_are_apart() -> None:
    router, ids = two(), random.Random(5).sample(range(3, 30_000), 320)
    store(router, 1, ids, model="m", salt="s")
    assert predicted(router, ids, model="other")[1] == 0
    assert predicted(router, ids, model="m")[1] == 0
    assert predicted(router, ids, model="m", cache_salt="s")[1] > 250


def test_a_parent_never_heard_of_is_left_alone() -> None:
    router = two()
    router.feed.stored(0, "m", "", [1], 99, list(range(16)), BLOCK)
    assert router.feed.count(0) == 0
