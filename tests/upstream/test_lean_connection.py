"""A connection without a network: byte transcripts, cut at every place."""

from __future__ import annotations

import asyncio
import gc
import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import Phase, UpstreamError
from proxy.upstream.lean_connection import BUFFER_LIMIT, HEAD_LIMIT, JOIN_LIMIT, Connection
from proxy.upstream.lean_response import LeanResponse

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"


class Wire(asyncio.Transport):
    """Notes what the connection does to its socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.unsent = 0
        self.closed = False
        self.reading = True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)
        self.writes += 1

    def writelines(self, list_of_data: object) -> None:
        self.write(b"".join(list_of_data))  # type: ignore[call-overload]

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


@dataclass
class Home:
    calls: list[str] = field(default_factory=list)

    def free(self, connection: Connection) -> None:
        self.calls.append("free")

    def opened(self, connection: Connection) -> None:
        self.calls.append("opened")

    def lost(self, connection: Connection) -> None:
        self.calls.append("lost")


class Bench:
    """A connection with a wire and a home, and one exchange after the other on it."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.home = Home()
        self.connection = Connection(self.home)
        self.connection.connection_made(self.wire)
        self.home.calls.clear()

    def send(self, method: str = "GET", head: bytes = b"", body: bytes = b"") -> LeanResponse:
        # No task waits in these tests, so the exchange never asks its loop for anything.
        exchange = LeanResponse(None, method, None)  # type: ignore[arg-type]
        self.connection.send(exchange, head, body)
        return exchange

    def hear(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.connection.data_received(piece)


def error_of(exchange: LeanResponse) -> UpstreamError:
    assert exchange.carrier is None
    assert exchange._error is not None
    return exchange._error


RESPONSES = {
    "length": (OK, 2),
    "chunked": (CHUNKED, None),
    "interim": (b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n" + OK, 2),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", None),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 99\r\n\r\n", 99),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 0),
    "trailers": (CHUNKED[:-2] + b"x-sum: 1\r\n\r\n", None),
    "long": (b"HTTP/1.1 200 OK\r\ncontent-length: 40\r\n\r\n" + b"ok" * 20, 40),
}
EXPECTED = {"no content": b"", "not modified": b"", "empty": b"", "long": b"ok" * 20}


def splits(data: bytes) -> list[tuple[bytes, ...]]:
    """Whole, cut at each place, and byte by byte."""
    cuts = [(data[:at], data[at:]) for at in range(1, len(data))]
    return [(data,), *cuts, tuple(bytes([byte]) for byte in data)]


@pytest.mark.parametrize("name", RESPONSES)
def test_same_result_wherever_it_is_cut(name: str) -> None:
    reply, length = RESPONSES[name]
    for pieces in splits(reply):
        bench = Bench()
        for _ in range(3):  # the parser is used again
            if bench.wire.closed:
                bench = Bench()
            exchange = bench.send()
            bench.hear(*pieces)
            assert exchange.whole() == EXPECTED.get(name, b"ok"), pieces
            assert exchange.content_length == length
            assert len(exchange.headers) == (0 if name == "no content" else 1)
        # Whether something follows cannot be seen in a last read of under five bytes, unless it is of a known length.
        assert bench.home.calls == (
            ["free"] * 3 if name in ("length", "interim", "long") or len(pieces[-1]) > 4 else []
        )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(RESPONSES)), min_size=1, max_size=6), st.data())
def test_sequences_in_random_pieces(names: list[str], data: st.DataObject) -> None:
    bench = Bench()
    for name in names:
        reply, _ = RESPONSES[name]
        cuts = sorted(data.draw(st.sets(st.integers(1, len(reply) - 5), max_size=5)))
        exchange = bench.send()
        bench.hear(*(reply[start:end] for start, end in itertools.pairwise([0, *cuts, len(reply)])))
        assert exchange.whole() == EXPECTED.get(name, b"ok")
    assert bench.home.calls == ["free"] * len(names)


@pytest.mark.parametrize("surplus", [b"\r\n", b"x", OK, b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("name", RESPONSES)
def test_anything_behind_the_response_closes(name: str, surplus: bytes) -> None:
    reply, _ = RESPONSES[name]
    for pieces in splits(reply):
        bench = Bench()
        exchange = bench.send()
        bench.hear(*pieces[:-1], pieces[-1] + surplus)
        assert exchange.whole() == EXPECTED.get(name, b"ok")
        assert bench.wire.closed
        assert bench.home.calls == []


def test_bytes_on_an_idle_connection_close_it() -> None:
    bench = Bench()
    bench.send()
    bench.hear(OK)
    assert not bench.wire.closed
    bench.hear(OK)
    assert bench.wire.closed


@pytest.mark.parametrize("closing", [b"HTTP/1.0 200 OK\r\n", b"HTTP/1.1 200 OK\r\nconnection: close\r\n"])
def test_last_response(closing: bytes) -> None:
    bench = Bench()
    exchange = bench.send()
    bench.hear(closing + b"content-length: 2\r\n\r\nok")
    assert exchange.whole() == b"ok"
    assert bench.wire.closed
    assert bench.home.calls == []


@pytest.mark.parametrize("reply", [OK[:-2], OK, b"HTTP/1.1 200 OK\r\n\r\n", CHUNKED])
def test_head_request_ends_the_connection(reply: bytes) -> None:
    bench = Bench()
    exchange = bench.send("HEAD")
    bench.hear(reply)
    assert exchange.whole() == b""
    assert bench.wire.closed


def test_until_close() -> None:
    for pieces in splits(b"HTTP/1.1 200 OK\r\n\r\nsome\r\n\r\nbody"):
        bench = Bench()
        exchange = bench.send()
        bench.hear(*pieces)
        assert exchange.whole() is None
        bench.connection.eof_received()
        bench.connection.connection_lost(None)
        assert exchange.whole() == b"some\r\n\r\nbody"
        assert bench.home.calls == ["lost", "lost"]


@pytest.mark.parametrize("exc", [None, ConnectionResetError(), OSError(110, "")])
@pytest.mark.parametrize("got", [b"", b"H", b"HTTP/1.1 100 Continue\r\n\r\n", OK[:-1], b"HTTP/1.1 200 OK\r\n\r\n"])
@pytest.mark.parametrize("used", [False, True])
def test_lost(used: bool, got: bytes, exc: Exception | None) -> None:
    bench = Bench()
    if used:
        bench.send()
        bench.hear(OK)
    exchange = bench.send()
    if got:
        bench.hear(got)
    bench.connection.connection_lost(exc)
    if got.endswith(b"OK\r\n\r\n") and exc is None:
        assert exchange.whole() == b""
        return
    assert error_of(exchange).phase is (Phase.MID_STREAM if exchange.status else Phase.MAYBE_SENT)
    assert exchange.stale == (used and not got and not (exc and exc.args))


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx : y\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: y\r\n z\r\n\r\n",
        b"HTTP/1.1 200 OK\nx: y\n\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * HEAD_LIMIT + b"z",
    ],
)
def test_refused(reply: bytes) -> None:
    bench = Bench()
    exchange = bench.send()
    bench.hear(reply)
    assert error_of(exchange).phase is Phase.MAYBE_SENT
    assert bench.wire.closed
    bench.connection.connection_lost(None)
    assert "free" not in bench.home.calls


def test_endless_interim_responses() -> None:
    bench = Bench()
    exchange = bench.send()
    while not bench.wire.closed:
        bench.hear(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
    assert error_of(exchange).message == "response head too large"


def test_broken_chunk() -> None:
    bench = Bench()
    exchange = bench.send()
    bench.hear(CHUNKED[:52], b"zz\r\n")
    assert error_of(exchange).phase is Phase.MID_STREAM
    assert bench.wire.closed


@pytest.mark.parametrize("chunked", [False, True])
def test_backpressure(chunked: bool) -> None:
    bench = Bench()
    exchange = bench.send()
    piece = b"x" * 65_536
    framed = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    bench.hear(CHUNKED[:47] if chunked else b"HTTP/1.1 200 OK\r\ncontent-length: 10000000\r\n\r\n")
    heard = 0
    while bench.wire.reading:
        bench.hear(framed)
        heard += 1
    assert BUFFER_LIMIT - len(piece) <= heard * len(piece) <= BUFFER_LIMIT + len(piece)
    asyncio.run(exchange.__anext__())  # type: ignore[arg-type]
    assert bench.wire.reading


def test_brake_is_off_when_the_connection_goes_back() -> None:
    bench = Bench()
    exchange = bench.send()
    size = BUFFER_LIMIT + 10
    bench.hear(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size, b"x" * (size - 5))
    assert not bench.wire.reading
    bench.hear(b"x" * 5)  # TLS hands on what it had read before the pause
    assert bench.wire.reading
    assert exchange.whole() == b"x" * size
    assert bench.home.calls == ["free"]


@pytest.mark.parametrize("size", [0, 5, JOIN_LIMIT, JOIN_LIMIT + 1])
def test_request_is_one_write(size: int) -> None:
    bench = Bench()
    bench.send("POST", b"head\r\n\r\n", b"b" * size)
    assert (bench.wire.written, bench.wire.writes) == (b"head\r\n\r\n" + b"b" * size, 1)


def test_answer_before_the_request_is_out() -> None:
    bench = Bench()
    exchange = bench.send("POST", b"head", b"body")
    bench.wire.unsent = 1
    bench.hear(OK)
    assert exchange.whole() == b"ok"
    assert bench.wire.closed


def test_late_abort_after_the_next_request() -> None:
    bench = Bench()
    first = bench.send()
    bench.hear(OK)
    second = bench.send()
    first.abort()
    assert not bench.wire.closed
    bench.hear(OK)
    assert second.whole() == b"ok"


def test_bytes_after_an_abort_are_nobody_s() -> None:
    bench = Bench()
    exchange = bench.send()
    bench.hear(OK[:-1])
    exchange.abort()
    bench.hear(OK[-1:])
    bench.connection.connection_lost(None)
    assert error_of(exchange).message == "aborted"
    assert bench.home.calls == ["lost"]


def test_shut() -> None:
    bench = Bench()
    exchange = bench.send()
    bench.connection.shut()
    assert error_of(exchange).message == "transport closed"
    assert bench.wire.closed


def test_a_lost_connection_is_not_left_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        bench = Bench()
        exchange = bench.send()
        bench.hear(OK)
        assert exchange.whole() == b"ok"
        bench.connection.connection_lost(None)
        del bench, exchange
        assert not [kept for kept in gc.get_objects() if isinstance(kept, Connection)]
    finally:
        gc.enable()
