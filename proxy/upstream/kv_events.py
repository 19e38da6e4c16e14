"""vLLM's own cache events over ZeroMQ (extra `kv-events`): a subscription per replica, decoded and handed on.

Observed on 0.27.1: each message is [topic, sequence number (8 bytes, big-endian), msgpack of [time, events, rank]]; an
event is a map with its name under "type". The engine binds (`--kv-events-config` with endpoint "tcp://*:5557").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from proxy.routing.engine_feed import BlockHash, EngineFeed

logger = logging.getLogger("lorafleet.kv_events")


class Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: list[BlockHash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: BlockHash | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    medium: str | None = None


class Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[Stored | Removed | Cleared]
    rank: int | None = None


_decoder = msgspec.msgpack.Decoder(Batch)


def endpoint_of(base: str, port: int) -> str:
    """Where the replica at `base` publishes, when it does so at `port`."""
    host = urlsplit(base).hostname or "127.0.0.1"
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def salt_of(event: Stored) -> str:
    """The cache salt that a prompt's first block was hashed with, "" for none: the one string in its extra keys that is
    not the adapter's name."""
    first = event.extra_keys[0] if event.extra_keys else None
    if event.parent_block_hash is not None or not isinstance(first, list | tuple):
        return ""
    names = [key for key in first if isinstance(key, str) and key != event.lora_name]
    return names[-1] if names else ""


class Reader:
    """Turns one replica's messages into calls of an `EngineFeed`. No network: `take` is given the frames."""

    def __init__(self, feed: EngineFeed, replica: int, base_model: Callable[[], str]) -> None:
        self._feed = feed
        self._replica = replica
        self._base_model = base_model
        self._expected: int | None = None
        self.events = 0
        self.gaps = 0

    def take(self, frames: list[bytes]) -> None:
        """One message. After a gap nothing is sure, so the replica's part of the index begins anew."""
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        number = int.from_bytes(frames[-2], "big")
        if self._expected is not None and number != self._expected:
            self.gaps += 1
            self._feed.cleared(self._replica)
        self._expected = number + 1
        try:
            batch = _decoder.decode(frames[-1])
        except msgspec.DecodeError as error:
            logger.warning("replica %d: an event that cannot be read (%s)", self._replica, error)
            self._feed.cleared(self._replica)
            return
        for event in batch.events:
            self.events += 1
            self._one(event)

    def _one(self, event: Stored | Removed | Cleared) -> None:
        if isinstance(event, Cleared):
            self._feed.cleared(self._replica)
        elif event.medium not in (None, "GPU"):
            return
        elif isinstance(event, Removed):
            self._feed.removed(self._replica, event.block_hashes)
        else:
            model = event.lora_name or self._base_model()
            self._feed.stored(
                self._replica,
                model,
                salt_of(event),
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
            )


async def follow(endpoint: str, reader: Reader) -> None:
    """Read until cancelled; ZeroMQ connects again by itself. Raises ImportError without pyzmq."""
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context.instance()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    try:
        while True:
            reader.take(await socket.recv_multipart())
    except asyncio.CancelledError:
        raise
    finally:
        socket.close()


class Subscriptions:
    """One subscription for each replica of the fleet. `endpoints` maps base URLs to endpoints of their own."""

    def __init__(
        self, feed: EngineFeed, port: int, endpoints: Mapping[str, str], base_model: Callable[[], str]
    ) -> None:
        self._feed = feed
        self._port = port
        self._endpoints = endpoints
        self._base_model = base_model
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.readers: dict[int, Reader] = {}

    def sync(self, members: Mapping[int, str]) -> None:
        """Follow exactly these replicas (index to base URL)."""
        for index in self._tasks.keys() - members.keys():
            self._tasks.pop(index).cancel()
            del self.readers[index]
        for index in members.keys() - self._tasks.keys():
            base = members[index]
            endpoint = self._endpoints.get(base) or endpoint_of(base, self._port)
            reader = self.readers[index] = Reader(self._feed, index, self._base_model)
            self._tasks[index] = asyncio.get_running_loop().create_task(follow(endpoint, reader))

    async def stop(self) -> None:
        self.sync({})
