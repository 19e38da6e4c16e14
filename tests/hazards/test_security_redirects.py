"""A replica that answers with a redirect, to a control call or a look: not followed, so the token goes nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Rig, quick, rig  # noqa: F401
from tests.web.scripted import Scripted

PATHS = (
    "/v1/load_lora_adapter",
    "/pause",
    "/reset_prefix_cache",
    "/abort_requests",
    "/v1/models",
    "/is_paused",
    "/server_info",
    "/version",
    "/metrics",
    "/health",
)


def redirecting(it: Rig, path: str, status: int, to: str) -> None:
    inner = it.replicas[0].http.app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != path:
            await inner(scope, receive, send)
            return
        location = (b"location", f"{to}{path}".encode())
        await send({"type": "http.response.start", "status": status, "headers": [location]})
        await send({"type": "http.response.body", "body": b""})

    it.replicas[0].http.app = app


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_not_followed(status: int, tmp_path: Path) -> None:
    trap = await Scripted().start()
    async with rig(2, tmp_path) as it:
        for path in PATHS:
            redirecting(it, path, status, trap.url)
        await it.load("a", it.library.path(1))
        await it.pause()
        await it.ask("POST", "/reset_prefix_cache")
        await it.ask("POST", "/abort_requests", {})
        for path in ("/metrics", "/server_info?config_format=json", "/version"):
            await it.ask("GET", path)
        await it.until(lambda: it.parts.fleet.replicas[0].state.value == "down", "seen to be ill")
        answers, it.said = list(it.said), []
        assert not any(trap.url in answer.text + str(answer.headers) for answer in answers)
    assert not trap.calls
    await trap.stop()
