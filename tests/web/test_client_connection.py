from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from proxy.web import client_connection
from proxy.web.client_connection import HEAD_LIMIT, PIPELINED, READ_AHEAD, ClientConnection
from proxy.web.client_request import ClientRequest

App = Callable[[Any, Any, Any], Awaitable[None]]


async def whole(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError
        body += message["body"]
        if not message["more_body"]:
            return body


async def answer(send: Any, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    lines = [(b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    await answer(send, b"%b %b" % (scope["path"].encode(), await whole(receive)))


class Here:
    """A server and what goes wrong in it."""

    def __init__(self, port: int, state: ServerState) -> None:
        self.port = port
        self.state = state

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def say(self, data: bytes) -> bytes:
        """Everything that comes until the server closes; ask it to."""
        reader, writer = await self.connect()
        writer.write(data)
        async with asyncio.timeout(10):
            said = await reader.read()
        writer.close()
        return said


@contextlib.asynccontextmanager
async def serving(app: App, *, idle_secs: int = 60) -> AsyncIterator[Here]:
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=idle_secs)
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: ClientConnection(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield Here(server.sockets[0].getsockname()[1], state)
        async with asyncio.timeout(10):
            while state.tasks:
                await asyncio.sleep(0.005)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


GET = b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSING = b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


async def test_several_requests_on_one_connection() -> None:
    async with serving(echo) as here:
        reader, writer = await here.connect()
        for path in (b"/a", b"/b%20c?d=%20"):
            writer.write(GET % path)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close" not in head
            assert await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0])) in (
                b"/a ",
                b"/b c ",
            )
        writer.close()


async def test_what_the_scope_says() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append({key: scope[key] for key in ("method", "path", "raw_path", "query_string", "http_version")})
        seen.append((scope["headers"], await whole(receive)))
        await answer(send, b"")

    async with serving(app) as here:
        await here.say(b"POST /a%2Fb?x=1 HTTP/1.0\r\nHost: x\r\nX-Two: 2\r\ncontent-length: 3\r\n\r\nabc")
    expected = {"method": "POST", "path": "/a/b", "raw_path": b"/a%2Fb", "query_string": b"x=1", "http_version": "1.0"}
    assert seen[0] == expected
    assert seen[1] == ([(b"host", b"x"), (b"x-two", b"2"), (b"content-length", b"3")], b"abc")


async def test_an_answer_is_one_write() -> None:
    told: list[bytes] = []

    class Raw:
        def write(self, data: bytes) -> None:
            told.append(data)

        def get_extra_info(self, name: str) -> None:
            return None

        def is_closing(self) -> bool:
            return False

    config = uvicorn.Config(echo, lifespan="off", log_config=None)
    connection = ClientConnection(config=config, server_state=ServerState(), app_state={})
    connection.connection_made(Raw())  # type: ignore[arg-type]
    connection.data_received(GET % b"/")
    for _ in range(5):
        await asyncio.sleep(0)
    assert told == [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n/ "]
    connection.connection_lost(None)


async def test_pipelined_requests_are_answered_in_turn() -> None:
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        order.append(scope["path"])
        await asyncio.sleep(0.002)
        order.append(scope["path"])
        await answer(send, scope["path"].encode())

    count = PIPELINED
    async with serving(app) as here:
        asked = b"".join(GET % b"/%d" % number for number in range(count))
        said = await here.say(asked + CLOSING % b"/last")
    assert order == [path for number in [*range(count), "last"] for path in [f"/{number}"] * 2]
    assert said.count(b"HTTP/1.1 200") == count + 1


@pytest.mark.parametrize(
    "behind",
    [
        b"",
        (GET % b"/") * (3 * PIPELINED),
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" + b"x" * (4 * READ_AHEAD),
        b"nonsense\r\n\r\n",
    ],
    ids=["nothing", "many requests", "an endless body", "no request"],
)
async def test_a_departure_is_noticed_whatever_waits_behind(behind: bytes) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["lorafleet.request"].watch(left.set)
        arrived.set()
        await left.wait()

    async with serving(app) as here:
        _, writer = await here.connect()
        writer.write(GET % b"/" + behind)
        await arrived.wait()
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.transport.abort()
        async with asyncio.timeout(10):
            await left.wait()


async def test_more_requests_than_may_wait_are_not_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        await answer(send, scope["path"].encode())

    async with serving(app) as here:
        said = await here.say((GET % b"/") * (2 * PIPELINED))
    assert said.count(b"HTTP/1.1 200") == PIPELINED + 1
    assert said.count(b"connection: close") == 1


@pytest.mark.parametrize("endless", [b"0\r\nx: ", b"1;x="], ids=["trailer", "extension"])
async def test_what_surrounds_a_chunk_is_limited(endless: bytes) -> None:
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(app) as here:
        _, writer = await here.connect()
        writer.write(head + b"2\r\nok\r\n" + endless + b"y" * (4 * HEAD_LIMIT))
        async with asyncio.timeout(10):
            await gone.wait()
        writer.close()


async def test_trailers_are_no_headers() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = await whole(receive)
        await answer(send, b"%b %d" % (body, len(scope["headers"])))

    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(app) as here:
        said = await here.say(head + b"2\r\nok\r\n0\r\nauthorization: x\r\n\r\n")
    assert said.endswith(b"ok 3")


async def test_nothing_is_answered_after_a_request_that_says_close() -> None:
    async with serving(echo) as here:
        said = await here.say(CLOSING % b"/a" + GET % b"/b")
    assert said.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in said


@pytest.mark.parametrize(
    ("request_line", "headers", "head", "body"),
    [
        (b"GET / HTTP/1.1", [], b"transfer-encoding: chunked", b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        (b"GET / HTTP/1.0", [], b"connection: close", b"onetwo"),
        (b"GET / HTTP/1.1", [(b"content-length", b"6")], b"content-length: 6", b"onetwo"),
        (b"HEAD / HTTP/1.1", [(b"content-length", b"6")], b"content-length: 6", b""),
    ],
)
async def test_how_a_body_is_framed(request_line: bytes, headers: Any, head: bytes, body: bytes) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": True})
        await send({"type": "http.response.body"})

    async with serving(app) as here:
        said = await here.say(request_line + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
    lines, _, rest = said.partition(b"\r\n\r\n")
    assert head in lines.split(b"\r\n")
    assert rest == body


async def test_large_parts_go_out_unchanged() -> None:
    parts = [bytes([number]) * (100_000 * number + 1) for number in range(1, 5)]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as here:
        said = await here.say(CLOSING % b"/")
    body = said.partition(b"\r\n\r\n")[2]
    assert body == b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("ending", ["returns", "raises", "is cancelled", "too short", "too long"])
async def test_an_unfinished_answer_never_looks_whole(ending: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        if ending == "raises":
            raise RuntimeError(ending)
        if ending == "is cancelled":
            raise asyncio.CancelledError
        if ending.startswith("too"):
            await send({"type": "http.response.body", "body": b"x" * (3 if ending == "too short" else 30)})

    async with serving(app) as here:
        said = await here.say(GET % b"/")
    assert len(said.partition(b"\r\n\r\n")[2]) < 9


@pytest.mark.parametrize("ending", ["returns", "raises"])
async def test_an_application_that_says_nothing_is_500(ending: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if ending == "raises":
            raise RuntimeError("secret")

    async with serving(app) as here:
        said = await here.say(GET % b"/")
    assert said.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in said


async def test_an_answer_before_the_body_came() -> None:
    """The rest of the body is thrown away, and the connection goes on."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, scope["path"].encode())

    async with serving(app) as here:
        reader, writer = await here.connect()
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab")
        assert (await reader.readuntil(b"/a")).startswith(b"HTTP/1.1 200 ")
        writer.write(b"cde" + CLOSING % b"/b")
        assert (await reader.read()).endswith(b"/b")
        writer.close()


async def test_a_client_that_waits_to_be_told_to_go_on() -> None:
    async with serving(echo) as here:
        reader, writer = await here.connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert await reader.readuntil(b"/ ok")
        writer.close()


async def test_a_body_that_nobody_reads_is_left_in_the_socket() -> None:
    go = asyncio.Event()
    held: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = scope["lorafleet.request"]
        while request.read_ahead <= READ_AHEAD:
            await asyncio.sleep(0.005)
        await go.wait()
        held.append(request.read_ahead)
        await answer(send, b"%d" % len(await whole(receive)))

    size = 40 * READ_AHEAD
    async with serving(app) as here:
        reader, writer = await here.connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        await asyncio.sleep(0.1)
        go.set()
        assert await reader.readuntil(b"%d" % size)
        writer.close()
    assert held[0] < 3 * READ_AHEAD


async def test_a_client_that_does_not_read_stops_the_application() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(600):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
            sent += 1
        await send({"type": "http.response.body"})

    async with serving(app) as here:
        reader, writer = await here.connect()
        writer.write(CLOSING % b"/")
        before = -1
        while sent != before:  # until it stands still
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 500
        assert len(await reader.read()) > 60_000_000
        writer.close()


@pytest.mark.parametrize("when", ["before the watch", "later"])
async def test_the_departure_of_a_client_is_told_once(when: str) -> None:
    told: list[str] = []
    arrived, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await whole(receive)
        arrived.set()
        request = scope["lorafleet.request"]
        if when == "before the watch":
            while not request.gone:
                await asyncio.sleep(0.005)
        request.watch(lambda: (told.append("left"), left.set()))
        await left.wait()
        assert (await receive())["type"] == "http.disconnect"
        await answer(send, b"to nobody")

    async with serving(app) as here:
        _, writer = await here.connect()
        writer.write(GET % b"/")
        await arrived.wait()
        writer.close()
        async with asyncio.timeout(10):
            await left.wait()
    assert told == ["left"]


async def test_a_client_with_its_answer_did_not_leave() -> None:
    told: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["lorafleet.request"].watch(lambda: told.append("left"))
        await answer(send, b"all")
        assert (await receive())["type"] == "http.disconnect"

    async with serving(app) as here:
        await here.say(CLOSING % b"/")
    assert not told


async def test_nothing_is_left_to_the_garbage_collector() -> None:
    """It runs rarely while requests wait: a cycle that each of them leaves would pile up until then."""
    arrived = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/stay":
            arrived.set()
            while (await receive())["type"] != "http.disconnect":
                pass
        else:
            await echo(scope, receive, send)

    def left() -> list[Any]:
        return [kept for kept in gc.get_objects() if isinstance(kept, (ClientConnection, ClientRequest))]

    gc.collect()
    gc.disable()
    try:
        async with serving(app) as here:
            await here.say(GET % b"/1" + GET % b"/2" + CLOSING % b"/3")
            _, writer = await here.connect()
            writer.write(GET % b"/stay")
            await arrived.wait()
            writer.close()
            async with asyncio.timeout(10):
                while left():
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * (HEAD_LIMIT + 1), b"431"),
    ],
)
async def test_what_is_not_http_is_refused(data: bytes, status: bytes) -> None:
    async with serving(echo) as here:
        said = await here.say(data)
    assert said.startswith(b"HTTP/1.1 " + status)
    assert said.count(b"HTTP/1.1 ") == 1


async def test_an_owed_answer_goes_out_before_the_connection_ends() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.02)
        await answer(send, scope["path"].encode())

    async with serving(app) as here:
        said = await here.say(GET % b"/a" + GET % b"/b" + b"nonsense\r\n\r\n")
    assert said.count(b"HTTP/1.1 200") == 2
    assert said.endswith(b"/b")


async def test_an_offer_to_upgrade_is_answered_as_a_request() -> None:
    async with serving(echo) as here:
        said = await here.say(b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n\0\0\0")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nconnection: close\r\n" in said


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    asked, over = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await over.wait()
        await answer(send, b"late")

    async with serving(app, idle_secs=1) as here:
        busy = asyncio.create_task(here.say(CLOSING % b"/"))
        await asked.wait()
        assert await here.say(b"GET / HT") == b""  # the busy one is older
        over.set()
        assert (await busy).endswith(b"late")


async def test_the_end_of_the_server_waits_for_answers() -> None:
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await answer(send, b"whole")

    async with serving(app) as here:
        busy = asyncio.create_task(here.say(GET % b"/"))
        idle = asyncio.create_task(here.say(b""))
        while len(here.state.connections) < 2 or not here.state.tasks:
            await asyncio.sleep(0.005)
        for connection in list(here.state.connections):
            connection.shutdown()
        assert await idle == b""
        go.set()
        assert (await busy).endswith(b"whole")
        assert not here.state.connections


def test_targets_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_connection, "_targets", {})
    for number in range(400):
        assert client_connection._target(b"/a%%20%d?q" % number) == (f"/a {number}", b"/a%%20%d" % number, b"q")
    assert len(client_connection._targets) == 256
