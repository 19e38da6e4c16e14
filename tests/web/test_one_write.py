from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from proxy.web.one_write import PIECES, TOGETHER, OneWrite, OneWriteProtocol


class Raw:
    """A transport that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.closing = False

    def write(self, data: bytes) -> None:
        self.told.append(bytes(data))

    def close(self) -> None:
        self.closing = True
        self.told.append("close")

    def abort(self) -> None:
        self.closing = True
        self.told.append("abort")

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.told.append("pause")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


def pair() -> tuple[Raw, OneWrite]:
    raw = Raw()
    return raw, OneWrite(raw, asyncio.get_running_loop())  # type: ignore[arg-type]


async def test_what_is_written_in_one_turn_goes_out_together() -> None:
    raw, one = pair()
    one.write(b"head")
    one.write(b"body")
    assert raw.told == []
    await asyncio.sleep(0)
    one.write(b"more")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert raw.told == [b"headbody", b"more"]


async def test_large_pieces_and_many_pieces_are_not_held() -> None:
    raw, one = pair()
    large = b"x" * TOGETHER
    one.write(b"head")
    one.write(large)
    assert raw.told == [b"head", large]
    for _ in range(PIECES):
        one.write(b"y")
    assert raw.told[2:] == [b"y" * PIECES]
    await asyncio.sleep(0)
    assert len(raw.told) == 3


async def test_closing_writes_first_and_aborting_does_not() -> None:
    raw, one = pair()
    one.write(b"last")
    one.close()
    assert raw.told == [b"last", "close"]
    raw, one = pair()
    one.write(b"last")
    one.abort()
    await asyncio.sleep(0)
    assert raw.told == ["abort"]


async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    raw, one = pair()
    one.write(b"late")
    raw.closing = True
    await asyncio.sleep(0)
    assert one.is_closing()
    assert raw.told == []


async def test_the_rest_is_passed_on() -> None:
    raw, one = pair()
    one.pause_reading()
    assert raw.told == ["pause"]


async def test_an_answer_is_one_write() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(app, lifespan="off", log_config=None)
    protocol = OneWriteProtocol(config=config, server_state=ServerState(), app_state={})
    raw = Raw()
    protocol.connection_made(raw)  # type: ignore[arg-type]
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(5):
        await asyncio.sleep(0)
    assert raw.told == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"]
    protocol.timeout_keep_alive_task.cancel()  # type: ignore[union-attr]
