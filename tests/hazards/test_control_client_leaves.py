"""The client of a change leaves in the middle: the change goes on to its end, and a request that asks for the same
attaches to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import quick, rig, weights_of  # noqa: F401
from tests.web.front import until


async def _send_and_leave(port: int, path: str, body: bytes, asked: asyncio.Event) -> None:
    """A real connection that is cut when `asked` is set."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await asked.wait()
    writer.transport.abort()


@pytest.mark.parametrize("phase", ["canary", "others"])
async def test_a_load_goes_on(phase: str, tmp_path: Path) -> None:
    async with rig(3, tmp_path) as it, it.port() as port:
        slow = it.replicas[0] if phase == "canary" else it.replicas[2]
        slow.faults.add("slow", "load", secs=0.5)
        path = it.library.path(1)
        body = f'{{"lora_name": "a", "lora_path": "{path}"}}'.encode()
        asked = asyncio.Event()
        client = asyncio.create_task(_send_and_leave(port, "/v1/load_lora_adapter", body, asked))
        await until(lambda: slow.calls["load"])
        asked.set()
        await client
        assert (await it.load("a", path)).ok  # the trainer tries again
        it.names["a"] = weights_of(path)
        assert [replica.calls["load"] for replica in it.replicas] == [1, 1, 1]
        await it.check()


async def test_a_pause_goes_on(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it, it.port() as port:
        it.replicas[1].faults.add("slow", "pause", secs=0.3)
        asked = asyncio.Event()
        client = asyncio.create_task(_send_and_leave(port, "/pause?mode=keep", b"", asked))
        await until(lambda: it.replicas[1].calls["pause"])
        asked.set()
        await client
        await it.until(lambda: it.parts.fleet.desired.pause is not None, "paused")
        it.paused = True
        await it.check()


async def test_many_that_leave(tmp_path: Path) -> None:
    """Changes of all kinds whose clients never stay: the fleet ends in one mind."""
    async with rig(2, tmp_path, load_secs=0.05) as it, it.port() as port:
        asked = asyncio.Event()
        asked.set()
        for turn in range(6):
            body = f'{{"lora_name": "a", "lora_path": "{it.library.path(turn % 3)}"}}'.encode()
            for path, data in (
                ("/v1/load_lora_adapter", body),
                ("/pause?mode=keep", b""),
                ("/resume", b""),
                ("/v1/unload_lora_adapter", b'{"lora_name": "a"}'),
            ):
                await _send_and_leave(port, path, data, asked)
        await it.must_load("a", it.library.path(2))
        assert (await it.resume()).ok
        await it.check()
