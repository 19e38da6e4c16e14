import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from proxy.simulator.httpd import CONNECTION, HttpServer


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Echo; paths choose how."""
    message = await receive()
    path = scope["path"]
    if path == "/boom":
        raise RuntimeError("boom")
    if path == "/cut":
        scope["extensions"][CONNECTION].reset()
        return
    if path == "/wait":
        seen.append((await receive())["type"])
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-path", path.encode())]})
    if path == "/stream":
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": message["body"]})


seen: list[str] = []


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    seen.clear()
    server = HttpServer(app)
    await server.listen()
    yield server
    server.close()
    await asyncio.sleep(0)


async def talk(server: HttpServer, raw: bytes) -> bytes:
    """Send, half-close nothing, read until the server closes."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    return answer


def get(path: str, *headers: str, body: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


CLOSE = "connection: close"


async def test_echo_and_headers(server: HttpServer) -> None:
    answer = await talk(server, get("/e%20cho", CLOSE, body="hello"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"\r\nserver: uvicorn\r\n" in head and b"x-path: /e cho" in head
    assert b"content-length: 5" in head and b"connection: close" in head
    assert body == b"hello"


async def test_streams_are_chunked(server: HttpServer) -> None:
    answer = await talk(server, get("/stream", CLOSE))
    assert b"transfer-encoding: chunked" in answer
    assert answer.endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")


async def test_keep_alive_and_pipelining(server: HttpServer) -> None:
    answer = await talk(server, get("/1", body="a") + get("/2", body="b") + get("/3", CLOSE, body="c"))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert answer.index(b"x-path: /1") < answer.index(b"x-path: /2") < answer.index(b"x-path: /3")


async def test_chunked_bodies_and_expect(server: HttpServer) -> None:
    head = b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"
    head += b"expect: 100-continue\r\n\r\n"
    answer = await talk(server, head + b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") and answer.endswith(b"abc")


async def test_head_has_no_body(server: HttpServer) -> None:
    answer = await talk(server, b"HEAD /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and answer.count(b"HTTP/1.1") == 1


async def test_nonsense_is_400(server: HttpServer) -> None:
    answer = await talk(server, b"what\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 Bad Request") and answer.endswith(b"Invalid HTTP request received.")


async def test_idle_connections_are_closed() -> None:
    server = HttpServer(app, keep_alive_secs=0.01)
    await server.listen()
    assert (await talk(server, get("/x", body="a"))).endswith(b"a")
    assert server.connections == set()
    server.close()


@pytest.mark.parametrize("path", ["/cut", "/boom"])
async def test_resets(server: HttpServer, path: str) -> None:
    with pytest.raises(ConnectionResetError):
        await talk(server, get(path))
    assert [str(failure) for failure in server.failures] == (["boom"] if path == "/boom" else [])


async def test_the_app_hears_of_a_client_that_leaves(server: HttpServer) -> None:
    _, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(get("/wait"))
    await writer.drain()
    writer.close()
    async with asyncio.timeout(5):
        while not seen:
            await asyncio.sleep(0.001)
    assert seen == ["http.disconnect"]


async def test_refusing_keeps_the_port_and_the_open_connections(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(get("/x", body="a"))
    await reader.readuntil(b"\r\n\r\na")
    server.refuse()
    assert not server.listening
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(server.host, server.port)
    writer.write(get("/x", body="b"))
    assert (await reader.readuntil(b"\r\n\r\nb")).endswith(b"b")
    port = server.port
    await server.listen()
    assert server.port == port
    assert (await talk(server, get("/x", CLOSE, body="c"))).endswith(b"c")
    server.reset_connections()
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()


async def test_close_idle_spares_the_busy(server: HttpServer) -> None:
    idle, idle_writer = await asyncio.open_connection(server.host, server.port)
    busy, busy_writer = await asyncio.open_connection(server.host, server.port)
    busy_writer.write(get("/wait"))
    async with asyncio.timeout(5):
        while not server.tasks or len(server.connections) < 2:
            await asyncio.sleep(0.001)
    server.close_idle()
    assert await idle.read() == b""
    assert len(server.tasks) == 1
    server.kill()
    with pytest.raises(ConnectionResetError):
        await busy.read()
    idle_writer.close()
    busy_writer.close()


async def test_a_taken_port_is_an_error(server: HttpServer) -> None:
    with pytest.raises(OSError, match="in use"):
        await HttpServer(app, port=server.port).listen()
