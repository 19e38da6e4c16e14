"""vLLM's event messages, as observed on 0.27.1, and what becomes of gaps and rubbish."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from proxy.routing.router import Router
from proxy.upstream.kv_events import Reader, endpoint_of, follow

IDS = list(range(100, 164))


def message(number: int, *events: dict[str, object]) -> list[bytes]:
    return [b"kv", number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, list(events), 0])]


def stored(**more: object) -> dict[str, object]:
    event: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": [b"a", b"b", b"c", b"d"],
        "parent_block_hash": None,
        "token_ids": IDS,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "v1",
        "extra_keys": [["v1"], ["v1"], ["v1"], ["v1"]],
        "group_idx": 0,
    }
    return event | more


def reader() -> tuple[Router, Reader]:
    router = Router()
    router.set_replica(0, key="http://a", block_size=16, capacity_tokens=4096)
    return router, Reader(router.feed, 0, lambda: "base")


def test_stored_removed_cleared() -> None:
    router, it = reader()
    it.take(message(7, stored()))
    assert router.feed.count(0) == 4
    it.take(message(8, {"type": "BlockRemoved", "block_hashes": [b"d"], "medium": "GPU"}))
    assert router.feed.count(0) == 3
    it.take(message(9, {"type": "AllBlocksCleared"}))
    assert router.feed.count(0) == 0
    assert (it.events, it.gaps) == (3, 0)


def test_a_gap_begins_anew() -> None:
    router, it = reader()
    it.take(message(1, stored()))
    it.take(message(3, stored(block_hashes=[b"x"], token_ids=IDS[:16])))
    assert router.feed.count(0) == 1
    assert it.gaps == 1


def test_other_media_and_rubbish() -> None:
    router, it = reader()
    it.take(message(1, stored(medium="CPU")))
    it.take([b"kv"])
    it.take([b"kv", (2).to_bytes(8, "big"), b"\xff\xff"])
    assert router.feed.count(0) == 0


def test_where_a_replica_publishes() -> None:
    assert endpoint_of("http://gpu-1:8000", 5557) == "tcp://gpu-1:5557"
    assert endpoint_of("http://[::1]:8000", 5557) == "tcp://[::1]:5557"


async def test_over_a_socket() -> None:
    router, it = reader()
    socket = zmq.asyncio.Context.instance().socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    task = asyncio.create_task(follow(f"tcp://127.0.0.1:{port}", it))
    number = 0
    async with asyncio.timeout(10):
        while not router.feed.count(0):  # a subscriber hears only what is said after it has connected
            number += 1
            await socket.send_multipart(message(number, stored()))
            await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    socket.close(0)
