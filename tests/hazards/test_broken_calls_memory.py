"""A call that breaks leaves nothing behind that only the collector of cycles would find: that runs seldom."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.web.front import Client, each_transport, front  # noqa: F401
from tests.web.scripted import Call, Scripted


def kept() -> list[object]:
    return [it for it in gc.get_objects() if type(it).__name__ in ("Exchange", "ClientRequest", "Relay")]


@pytest.mark.parametrize("breaking", [Call.close, Call.reset, Call.no_such_model])
async def test_broken_calls_hold_no_bodies(breaking: object) -> None:
    replica = await Scripted(breaking).start()  # type: ignore[arg-type]
    marker = "x" * 50_000
    async with front([replica.url], wait_ready_secs=0.3) as it:
        gc.collect()
        gc.disable()
        earlier = kept()  # of other tests
        try:
            for _ in range(3):
                client = await Client.connect(it)
                client.post({"model": "base", "prompt": marker})
                await client.until(b"\r\n\r\n")
                client.leave()
            await asyncio.sleep(0.05)
            known = {id(it) for it in earlier}
            found = [it for it in kept() if id(it) not in known]
        finally:
            gc.enable()
        assert not found
    await replica.stop()
