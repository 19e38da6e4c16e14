"""A web page elsewhere that makes a browser on this machine talk to the proxy cannot control the fleet."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.asgi import ask
from tests.faults.rig import Rig, quick, rig  # noqa: F401

CHANGES = (
    ("POST", "/pause?mode=abort"),
    ("POST", "/resume"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/abort_requests"),
    ("POST", "/fleet/replicas"),
    ("POST", "/fleet/replicas/0/drain"),
    ("DELETE", "/fleet/replicas/0"),
)


async def change(it: Rig, method: str, target: str, host: bytes, origin: bytes) -> int | None:
    scope_headers = [(b"origin", origin)]
    answer = await ask(it.app, method, target, b"{}", headers=scope_headers, host=host)
    return answer.status


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"127.0.0.1:8000", b"http://evil.test"),
        (b"127.0.0.1:8000", b"https://127.0.0.1.evil.test:8000"),
        (b"127.0.0.1:8000", b"http://127.0.0.1:9000"),
        (b"localhost:8000", b"null"),
        (b"localhost:8000", b"file://"),
        # A name of theirs that resolves to this machine: to the browser it is their own site.
        (b"evil.test:8000", b"http://evil.test:8000"),
        (b"localhost.evil.test:8000", b"http://localhost.evil.test:8000"),
    ],
)
async def test_pages_of_other_sites(host: bytes, origin: bytes, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        for method, target in CHANGES:
            assert await change(it, method, target, host, origin) == 400, target
        await it.check()


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"127.0.0.1:8000", b"http://127.0.0.1:8000"),
        (b"localhost:8000", b"http://localhost:8000"),
        (b"[::1]:8000", b"http://[::1]:8000"),
        (b"LOCALHOST:8000", b"http://localhost:8000"),
    ],
)
async def test_our_own_page(host: bytes, origin: bytes, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        assert await change(it, "POST", "/pause?mode=keep", host, origin) == 200
        it.paused = True
        await it.check()
