from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from proxy.errors import BadRequest
from proxy.web import body as module
from proxy.web.asgi import Message
from proxy.web.body import declared_length, read_body

GONE = {"type": "http.disconnect"}


def part(data: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


class Client:
    """Gives `messages` and collects what is answered."""

    def __init__(self, *messages: Message) -> None:
        self.messages = list(messages)
        self.sent: list[Message] = []
        self.left: list[str] = []

    async def receive(self) -> Message:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def read(self, limit: int = 10, headers: Sequence[tuple[bytes, bytes]] = ()) -> bytes | None:
        return await read_body({"headers": list(headers)}, self.receive, self.send, limit, self.left.append)

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def ended(self) -> bool:
        return not self.sent[-1].get("more_body", False)


@pytest.mark.parametrize(
    ("messages", "body"),
    [
        ([part(b"", False)], b""),
        ([part(b"abc", False)], b"abc"),
        ([part(b"abc"), part(b""), part(b"de"), part(b"f", False)], b"abcdef"),
        ([part(b"0123456789"), part(b"", False)], b"0123456789"),
        ([GONE], None),
        ([part(b"abc"), GONE], None),
    ],
)
async def test_the_body_is_read_to_its_end(messages: list[Message], body: bytes | None) -> None:
    client = Client(*messages)
    assert await client.read() == body
    assert not client.sent
    assert client.left == ([] if body is not None else ["body"])


async def test_one_chunk_is_not_copied() -> None:
    data = b"abc" * 3
    assert await Client(part(data, False)).read() is data


@pytest.mark.parametrize(
    ("messages", "left"),
    [
        ([part(b"0123456789a", False)], 0),  # all of it is here: nothing to wait for
        ([part(b"01234567"), part(b"89a", False)], 0),
        ([part(b"0123456789a"), part(b"x"), part(b"y", False), part(b"next")], 1),
        ([part(b"0123456789a"), GONE, part(b"next")], 1),
    ],
)
async def test_one_byte_too_much(messages: list[Message], left: int) -> None:
    client = Client(*messages)
    assert await client.read() is None
    assert client.status == 413
    assert (b"connection", b"close") in client.sent[0]["headers"]
    assert client.ended
    assert client.left == []
    assert len(client.messages) == left


async def test_a_declared_length_is_believed_and_what_comes_is_thrown_away() -> None:
    client = Client(part(b"x"), part(b"y", False))
    assert await client.read(headers=[(b"content-length", b"11")]) is None
    assert client.status == 413
    assert not client.messages


async def test_who_never_ends_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_SECS", 0.01)
    client = Client(part(b"x"))
    assert await client.read(headers=[(b"content-length", b"11")]) is None
    assert client.ended


async def test_who_sends_without_end_is_not_listened_to_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_BYTES", 30)
    client = Client(*[part(b"0123456789")] * 50)
    assert await client.read() is None
    assert client.ended
    assert len(client.messages) == 45


@pytest.mark.parametrize(
    ("headers", "length"),
    [
        ([], None),
        ([(b"content-length", b"12")], 12),
        ([(b"transfer-encoding", b"chunked")], None),
        ([(b"transfer-encoding", b"Chunked ")], None),
    ],
)
def test_declared_length(headers: list[tuple[bytes, bytes]], length: int | None) -> None:
    assert declared_length({"headers": headers}) == length


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"1"), (b"content-length", b"1")],
        [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"chunked"), (b"content-length", b"1")],
        [(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")],
        [(b"transfer-encoding", b"gzip, chunked")],
        [(b"transfer-encoding", b"identity")],
        [(b"content-length", b"+1")],
        [(b"content-length", b"1, 1")],
        [(b"content-length", b"")],
    ],
)
async def test_ambiguous_framing_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(BadRequest):
        declared_length({"headers": headers})
    client = Client(part(b"", False))
    assert await client.read(headers=headers) is None
    assert client.status == 400
    assert (b"connection", b"close") in client.sent[0]["headers"]
