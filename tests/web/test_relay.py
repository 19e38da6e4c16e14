from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from proxy.errors import Phase, UpstreamError
from proxy.lease import Served
from proxy.web import relay as module
from proxy.web import usage
from proxy.web.asgi import Message
from proxy.web.relay import Relay, content_type

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
REBOUND = Served("v1", "v1@bbbb", None, adapter=True)


class Response:
    """An answer in `parts`; `at_once` it can be had whole. A part that is an error is raised."""

    def __init__(
        self,
        *parts: bytes | UpstreamError,
        status: int = 200,
        headers: Sequence[tuple[bytes, bytes]] = (JSON,),
        sized: bool = True,
        at_once: bool = False,
    ) -> None:
        self.parts = parts
        self.status = status
        self.content_length = sum(len(part) for part in parts if isinstance(part, bytes)) if sized else None
        length = [(b"content-length", b"%d" % self.content_length)] if self.content_length is not None else []
        self.headers = [*headers, *length]
        self.at_once = at_once

    def whole(self) -> bytes | None:
        return b"".join(part for part in self.parts if isinstance(part, bytes)) if self.at_once else None

    async def chunks(self) -> AsyncIterator[bytes]:
        for part in self.parts:
            if isinstance(part, UpstreamError):
                raise part
            yield part

    async def read(self) -> bytes:
        return b"".join([part async for part in self.chunks()])

    def abort(self) -> None:
        raise AssertionError("not the relay's to do")


class Sink:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.relay = Relay(self.send)
        self.completed_before: int | None = None
        self.began_before: int | None = None

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def run(
        self, response: Response, body: bytes | None = None, served: Served | None = None, learn: bool = True
    ) -> None:
        def completed() -> None:
            self.completed_before = len(self.sent)

        def began() -> None:
            self.began_before = len(self.sent)

        stamps = [(b"x-stamp", b"1")]
        await self.relay.run(response, body, served, stamps, learn=learn, began=began, completed=completed)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def bodies(self) -> list[tuple[bytes, bool]]:
        return [(message["body"], message.get("more_body", False)) for message in self.sent[1:]]


async def test_an_answer_that_is_here_goes_in_one_piece() -> None:
    sink = Sink()
    await sink.run(Response(b"{}", b" ", at_once=True))
    assert sink.headers == {b"content-type": b"application/json", b"content-length": b"3", b"x-stamp": b"1"}
    assert sink.bodies == [(b"{} ", False)]
    assert (sink.relay.status, sink.relay.sent, sink.relay.complete) == (200, 3, True)


async def test_an_answer_that_comes_goes_as_it_comes() -> None:
    sink = Sink()
    await sink.run(Response(b"a", b"b", headers=[EVENTS], sized=False))
    assert sink.bodies == [(b"a", True), (b"b", True), (b"", False)]
    assert sink.began_before == 0
    assert sink.completed_before == 3  # the replica may die now, the end is still to be sent


async def test_an_answer_that_breaks_off_is_not_ended() -> None:
    sink = Sink()
    with pytest.raises(UpstreamError):
        await sink.run(Response(b"a", UpstreamError("reset", Phase.MID_STREAM)))
    assert sink.bodies == [(b"a", True)]
    assert not sink.relay.complete


async def test_the_head_waits_for_the_body() -> None:
    sink = Sink()
    with pytest.raises(UpstreamError):
        await sink.run(Response(UpstreamError("reset", Phase.MID_STREAM), sized=False))
    assert sink.sent == []
    assert (sink.relay.status, sink.began_before) == (None, None)


async def test_an_empty_body() -> None:
    sink = Sink()
    await sink.run(Response())
    assert sink.bodies == [(b"", False)]
    assert sink.began_before == 0


@pytest.mark.parametrize("status", [99, 101, 600, 999])
async def test_a_status_that_cannot_be_is_refused_before_anything_is_sent(status: int) -> None:
    sink = Sink()
    with pytest.raises(UpstreamError):
        await sink.run(Response(b"", status=status))
    assert sink.sent == []
    assert sink.relay.status is None


async def test_a_name_is_given_back_with_the_right_length() -> None:
    sink = Sink()
    await sink.run(Response(b'{"model":"v1@b', b'bbb"}'), served=REBOUND)
    assert sink.bodies == [(b'{"model":"v1"}', False)]
    assert sink.headers[b"content-length"] == b"14"


async def test_a_large_answer_gets_its_name_back_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL_ANSWER", 10)
    sink = Sink()
    await sink.run(Response(b'{"model":"v1@b', b'bbb"}'), served=REBOUND)
    assert sink.body == b'{"model":"v1"}'
    assert b"content-length" not in sink.headers


async def test_a_compressed_answer_is_left_alone() -> None:
    sink = Sink()
    response = Response(b'"model":"v1@bbbb"', headers=[JSON, (b"content-encoding", b"gzip")])
    await sink.run(response, served=REBOUND)
    assert sink.body == b'"model":"v1@bbbb"'


async def test_an_error_that_was_read_already() -> None:
    sink = Sink()
    await sink.run(Response(b"?", status=404), body=b"`v1@bbbb` does not exist", served=REBOUND)
    assert sink.bodies == [(b"`v1` does not exist", False)]


SAID = b'{"id":"c","usage":{"prompt_tokens":5}}'


@pytest.mark.parametrize("at_once", [True, False])
async def test_it_learns_from_an_answer(at_once: bool) -> None:
    sink = Sink()
    await sink.run(Response(SAID[:9], SAID[9:], at_once=at_once))
    assert sink.relay.learned.response_id == "c"
    assert sink.relay.learned.usage is not None and sink.relay.learned.usage.prompt_tokens == 5


async def test_it_learns_from_the_end_of_a_stream_and_keeps_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "TAIL", 100)
    sink = Sink()
    events = [b'data: {"text":"%d"}\n\n' % number for number in range(100)]
    await sink.run(Response(*events, b"data: " + SAID + b"\n\n", b"data: [DONE]\n\n", headers=[EVENTS], sized=False))
    assert sink.relay.learned.response_id == "c"


@pytest.mark.parametrize(
    ("response", "learn"),
    [
        (Response(SAID), False),
        (Response(SAID, status=400), True),
        (Response(SAID, headers=[JSON, (b"content-encoding", b"gzip")]), True),
        (Response(SAID, headers=[(b"content-type", b"text/plain")]), True),
    ],
)
async def test_it_learns_nothing_from_others(response: Response, learn: bool) -> None:
    sink = Sink()
    await sink.run(response, learn=learn)
    assert sink.relay.learned == usage.NOTHING


async def test_a_very_large_answer_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "LIMIT", 20)
    sink = Sink()
    await sink.run(Response(SAID[:15], SAID[15:], b"  "))
    assert sink.body == SAID + b"  "
    assert sink.relay.learned == usage.NOTHING


def test_content_type() -> None:
    assert content_type([(b"content-type", b"Text/HTML"), (b"content-encoding", b"Identity")]) == (b"text/html", False)
    assert content_type([(b"content-encoding", b"gzip")]) == (b"", True)
