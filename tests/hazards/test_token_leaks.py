"""A canary for a token: whatever goes wrong, it is in no answer, no log line and no counter."""

from __future__ import annotations

import logging
from collections.abc import Callable

import httpx
import pytest

from proxy.control.desired import Adapter
from proxy.upstream.transport import Endpoint
from tests.web.front import each_transport, front  # noqa: F401
from tests.web.scripted import Call, Scripted

CANARY = "canary-7f3a"
MINE = "client-key-51c9"
V1 = Adapter("v1", "/a/v1", None, "v1")


def _half(call: Call) -> None:
    call.head(200, "content-length: 100")
    call.write(b"half")
    call.close()


def _garbage(call: Call) -> None:
    call.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")
    call.close()


SCRIPTS: dict[str, Callable[[Call], None]] = {
    "fine": Call.answer,
    "reset": Call.reset,
    "closed": Call.close,
    "garbage": _garbage,
    "half": _half,
    "404": Call.no_such_model,
    "500": lambda call: call.answer(b"{}", 500),
    "502": lambda call: call.answer(b"bad", 502, media="text/plain"),
    "status 99": lambda call: call.answer(b"", 99),
    "status 999": lambda call: call.answer(b"", 999),
    "two lengths": lambda call: call.answer(b"", 200, "content-length: 7"),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_nowhere(path: str, script: Callable[[Call], None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    replica = await Scripted(script).start()
    endpoint = Endpoint(replica.url, lambda: CANARY)
    async with front([endpoint], wait_ready_secs=0.2) as it:
        it.bind(V1)
        async with httpx.AsyncClient(timeout=20) as client:
            try:
                answer = await client.post(
                    it.url + path, json={"model": "v1"}, headers={"authorization": f"Bearer {MINE}", "x-api-key": MINE}
                )
            except httpx.RemoteProtocolError:
                assert script is _half
            else:
                shown = answer.text + str(answer.headers)
                assert CANARY not in shown
                assert MINE not in shown
                assert "127.0.0.1" not in shown
        shown = caplog.text + repr(it.notes.outcomes) + repr(it.notes.retries) + repr(it.fleet.replicas)
    assert CANARY not in shown
    assert MINE not in shown
    assert replica.calls[0].header("authorization") == [f"Bearer {CANARY}"]
    assert MINE not in str(replica.calls[0].headers)
    await replica.stop()
