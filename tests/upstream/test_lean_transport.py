"""What only the lean transport promises; the rest is in test_transport*.py."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import Phase, UpstreamError
from proxy.upstream.lean_transport import LeanTransport
from proxy.upstream.transport import Endpoint

from .scripted import OK, Peer, answering, eventually, serving


async def test_value_that_is_not_utf8_passes() -> None:
    transport = LeanTransport()
    async with serving(answering(OK)) as server:
        await (await transport.request(server.endpoint(), "GET", "/?", headers=[(b"x", b"\xff\x80")])).read()
        assert server.requests[0].values(b"x") == [b"\xff\x80"]
        assert server.requests[0].line == b"GET /? HTTP/1.1"
        await transport.close()


async def test_small_answer_is_whole_when_the_request_returns() -> None:
    transport = LeanTransport()
    async with serving(answering(OK)) as server:
        for _ in range(3):
            response = await transport.request(server.endpoint(), "GET", "/")
            assert response.whole() == b"ok"
        await transport.close()


async def test_closing_fails_what_is_under_way() -> None:
    transport = LeanTransport()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with serving(script) as server:
        tasks = [asyncio.ensure_future(transport.request(server.endpoint(), "GET", "/")) for _ in range(5)]
        await eventually(lambda: len(server.requests) == 5)
        await transport.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(each) for each in results] == ["transport closed"] * 5
        await eventually(lambda: server.open == 0)


async def test_closing_while_connecting() -> None:
    transport = LeanTransport()
    async with serving(answering(OK)) as server:
        task = asyncio.ensure_future(transport.request(server.endpoint(), "GET", "/"))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(UpstreamError) as caught:
            await task
        assert caught.value.phase is Phase.NOT_SENT
        await eventually(lambda: server.open == 0)


async def test_replicas_do_not_share_connections() -> None:
    transport = LeanTransport()
    async with serving(answering(OK)) as one, serving(answering(OK)) as other:
        for server in (one, other, one, other):
            await (await transport.request(server.endpoint(), "GET", "/")).read()
        assert [len(server.peers) for server in (one, other)] == [1, 1]
        assert [len(server.requests) for server in (one, other)] == [2, 2]
        await transport.close()


@pytest.mark.parametrize("base", ["replica:8000", "http://user:secret@127.0.0.1:1", "unix:///x"])
async def test_unusable_address(base: str) -> None:
    with pytest.raises(UpstreamError) as caught:
        await LeanTransport().request(Endpoint(base), "GET", "/")
    assert caught.value.phase is Phase.NOT_SENT
    assert "secret" not in str(caught.value)
