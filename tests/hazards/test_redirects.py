"""A redirect is the client's to follow: the token never goes anywhere else, and no replica's address comes out."""

from __future__ import annotations

import httpx
import pytest

from proxy.upstream.transport import Endpoint
from tests.web.front import each_transport, front  # noqa: F401
from tests.web.scripted import Scripted


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("path", ["/v1/completions", "/elsewhere"])
async def test_it_is_passed_on_and_not_followed(path: str, status: int) -> None:
    elsewhere = await Scripted().start()
    replica = await Scripted(lambda call: call.answer(b"", status, f"location: {elsewhere.url}/trap")).start()
    async with front([Endpoint(replica.url, lambda: "canary")]) as it, httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(it.url + path, json={"model": "base"})
    assert answer.status_code == status
    assert "127.0.0.1" not in str(answer.headers)
    assert len(replica.calls) == 1
    assert not elsewhere.calls
    await replica.stop()
    await elsewhere.stop()


async def test_a_relative_location_stays() -> None:
    replica = await Scripted(lambda call: call.answer(b"", 307, "location: /v1/completions")).start()
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        answer = await client.post(it.url + "/v1/completions/", json={"model": "base"})
    assert (answer.status_code, answer.headers["location"]) == (307, "/v1/completions")
    await replica.stop()
