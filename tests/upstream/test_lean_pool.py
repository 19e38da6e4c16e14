import asyncio
import ssl

import pytest

from proxy.errors import BadRequest, UpstreamError
from proxy.upstream.lean_connection import Connection
from proxy.upstream.lean_pool import Address, Pool

from .test_lean_connection import Wire

ADDRESSES = {
    "http://a": Address("a", 80, False, "a", ""),
    "http://A.example:8000/": Address("a.example", 8000, False, "a.example:8000", ""),
    "https://a:443/x/y/": Address("a", 443, True, "a", "/x/y"),
    "http://a:443": Address("a", 443, False, "a:443", ""),
    "http://[::1]:8000/p": Address("::1", 8000, False, "[::1]:8000", "/p"),
}


@pytest.mark.parametrize("base", ADDRESSES)
def test_address(base: str) -> None:
    assert Address.of(base) == ADDRESSES[base]


@pytest.mark.parametrize(
    "base", ["", "a:8000", "ftp://a", "http://", "http://a:x", "http://u:p@a", "http://ä", "http://[x"]
)
def test_address_that_is_none(base: str) -> None:
    with pytest.raises(UpstreamError):
        Address.of(base)


class Clock(asyncio.AbstractEventLoop):
    """As much of an event loop as a pool asks for, with hands to turn."""

    def __init__(self) -> None:
        self.now = 50.0
        self.timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when, callback, *args, context=None):  # type: ignore[no-untyped-def]
        self.timers.append(asyncio.TimerHandle(when, callback, args, self, context))
        return self.timers[-1]

    def call_later(self, delay, callback, *args, context=None):  # type: ignore[no-untyped-def]
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.timers = [timer for timer in self.timers if timer is not handle]

    def get_debug(self) -> bool:
        return False

    def turn(self, secs: float) -> None:
        end = self.now + secs
        while due := [timer for timer in self.timers if timer.when() <= end]:
            timer = min(due, key=asyncio.TimerHandle.when)
            self.timers.remove(timer)
            self.now = max(self.now, timer.when())
            timer._callback(*timer._args)  # type: ignore[attr-defined]
        self.now = end


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool(clock: Clock) -> Pool:
    return Pool(Address.of("http://a:1/p"), clock, ssl.create_default_context, connect_secs=10, idle_secs=4)


def connected(pool: Pool) -> tuple[Connection, Wire]:
    connection, wire = Connection(pool), Wire()
    connection.connection_made(wire)
    return connection, wire


def test_last_used_first(pool: Pool) -> None:
    first, second = connected(pool)[0], connected(pool)[0]
    assert pool.take() is None
    pool.free(first)
    pool.free(second)
    assert [pool.take(), pool.take(), pool.take()] == [second, first, None]
    assert len(pool) == 2


def test_lost_connection_is_not_given_out(pool: Pool) -> None:
    first, second = connected(pool)[0], connected(pool)[0]
    pool.free(first)
    pool.free(second)
    pool.lost(second)
    pool.lost(second)
    assert [pool.take(), pool.take()] == [first, None]
    assert len(pool) == 1


def test_idle_connections_are_closed_in_time_and_no_timer_stays(pool: Pool, clock: Clock) -> None:
    wires = []
    for _ in range(3):
        connection, wire = connected(pool)
        wires.append(wire)
        pool.free(connection)
        clock.turn(1)
    clock.turn(0.99)
    assert [wire.closed for wire in wires] == [False, False, False]
    clock.turn(0.01)
    assert [wire.closed for wire in wires] == [True, False, False]
    clock.turn(1)
    assert [wire.closed for wire in wires] == [True, True, False]
    clock.turn(100)
    assert [wire.closed for wire in wires] == [True, True, True]
    assert clock.timers == []


def test_too_old_even_if_the_timer_is_late(pool: Pool, clock: Clock) -> None:
    connections = [connected(pool) for _ in range(2)]
    for connection, _ in connections:
        pool.free(connection)
    clock.now += 4
    assert pool.take() is None
    assert [wire.closed for _, wire in connections] == [True, True]
    clock.turn(1)
    assert clock.timers == []


def test_taken_connections_are_not_swept(pool: Pool, clock: Clock) -> None:
    connection, wire = connected(pool)
    pool.free(connection)
    assert pool.take() is connection
    clock.turn(100)
    assert not wire.closed


def test_close(pool: Pool, clock: Clock) -> None:
    (idle, idle_wire), (_, busy_wire) = connected(pool), connected(pool)
    pool.free(idle)
    pool.close()
    assert idle_wire.closed
    assert busy_wire.closed
    assert clock.timers == []
    assert pool.take() is None


def test_head(pool: Pool) -> None:
    lines = [(b"x-a", b"1"), (b"host", b"other"), (b"authorization", b"Bearer theirs")]
    assert pool.head("GET", "/v1/models?x", lines, None, 0) == (
        b"GET /p/v1/models?x HTTP/1.1\r\nhost: a:1\r\nx-a: 1\r\n\r\n"
    )
    assert pool.head("POST", "/", (), "one", 0) == (
        b"POST /p/ HTTP/1.1\r\nhost: a:1\r\ncontent-length: 0\r\nauthorization: Bearer one\r\n\r\n"
    )
    assert pool.head("POST", "/", (), "two", 12) == (
        b"POST /p/ HTTP/1.1\r\nhost: a:1\r\ncontent-length: 12\r\nauthorization: Bearer two\r\n\r\n"
    )
    assert b"authorization" not in pool.head("POST", "/", (), None, 12)


def test_head_of_many_targets(pool: Pool) -> None:
    for number in range(500):
        assert pool.head("GET", f"/{number}", (), None, 0).startswith(b"GET /p/%d HTTP/1.1\r\n" % number)
    assert len(pool._starts) <= 64


def test_bad_token_leaves_the_good_one(pool: Pool) -> None:
    pool.head("GET", "/", (), "good", 0)
    with pytest.raises(UpstreamError):
        pool.head("GET", "/", (), "bad\r\nx: y", 0)
    assert b"Bearer good\r\n" in pool.head("GET", "/", (), "good", 0)


@pytest.mark.parametrize(("method", "target"), [("TRACE", "/"), ("GET", "/ x"), ("GET", "x")])
def test_bad_start_is_refused_every_time(pool: Pool, method: str, target: str) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest):
            pool.head(method, target, (), None, 0)
