"""What is peculiar to the aiohttp transport; the rest is in test_transport*.py."""

from __future__ import annotations

import asyncio
import warnings

import aiohttp
import pytest

from proxy.errors import BadRequest
from proxy.upstream.aiohttp_transport import AiohttpTransport

from .scripted import OK, answering, serving


async def test_value_that_is_not_utf8_is_refused() -> None:
    transport = AiohttpTransport()
    async with serving(answering(OK)) as server:
        with pytest.raises(BadRequest):
            await transport.request(server.endpoint(), "GET", "/", headers=[(b"x", b"\xff")])
        assert server.peers == []
    await transport.close()


async def test_large_body_brings_no_warning() -> None:
    transport = AiohttpTransport()
    async with serving(answering(OK)) as server:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            response = await transport.request(server.endpoint(), "POST", "/", body=b"x" * 3_000_000)
            assert await response.read() == b"ok"
        assert server.requests[0].values(b"transfer-encoding") == []
        await transport.close()


async def test_aiohttp_does_not_repeat_by_itself() -> None:
    """The switch that is turned off is not part of its documented interface: notice when it goes."""
    async with aiohttp.ClientSession() as session:
        assert session._retry_connection is True


async def test_attempts_in_one_context_do_not_mix() -> None:
    transport = AiohttpTransport()
    async with serving(answering(OK)) as server:

        async def several() -> list[bytes]:
            calls = [transport.request(server.endpoint(), "GET", "/") for _ in range(5)]
            return [await (await call).read() for call in calls]

        assert await asyncio.gather(*(several() for _ in range(5))) == [[b"ok"] * 5] * 5
        await transport.close()
