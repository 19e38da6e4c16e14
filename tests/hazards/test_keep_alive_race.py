"""The replica closes an idle connection just as the next request goes out on it: nobody notices."""

from __future__ import annotations

import httpx

from tests.web.front import each_transport, front  # noqa: F401
from tests.web.scripted import Call, Scripted

REQUEST = {"model": "base", "prompt": [1, 2, 3]}


async def test_a_reused_connection_that_was_closed_is_replayed_on_a_fresh_one() -> None:
    async def script(call: Call) -> None:
        if call.on_connection > 1:
            call.close()  # as a server does whose idle time ran out when the request was on its way
        else:
            call.answer()

    replica = await Scripted(script).start()
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        for _ in range(10):
            assert (await client.post(it.url + "/v1/completions", json=REQUEST)).status_code == 200
        assert it.fleet.replicas[0].failures == 0
        assert not it.notes.retries
    assert len(replica.calls) > 10  # the race did happen
    await replica.stop()


async def test_connections_are_reused() -> None:
    """The opposite, so that the test above can fail."""
    replica = await Scripted().start()
    async with front([replica.url]) as it, httpx.AsyncClient(timeout=20) as client:
        for _ in range(10):
            assert (await client.post(it.url + "/v1/completions", json=REQUEST)).status_code == 200
    assert [call.on_connection for call in replica.calls] == list(range(1, 11))
    await replica.stop()
