"""No side door: only what lorafleet itself broadcasts reaches a control call of a replica, however it is spelled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.faults.rig import Rig, quick, rig  # noqa: F401

CONTROL = (
    "load",
    "unload",
    "pause",
    "resume",
    "reset",
    "reset_mm",
    "reset_encoder",
    "abort",
    "sleep",
    "wake_up",
    "weights",
    "collective_rpc",
)

ODD = (
    "GET /pause",
    "HEAD /pause",
    "PUT /pause",
    "DELETE /pause",
    "PATCH /pause",
    "OPTIONS /pause",
    "post /pause",
    "TRACE /pause",
    "GET //pause",
    "POST //pause",
    "POST /pause/",
    "GET /pause/",
    "POST /./pause",
    "GET /./pause",
    "POST /v1/../pause",
    "GET /v1/../pause",
    "POST /v1/%2e%2e/pause",
    "GET /v1/%2e%2e/pause",
    "GET /v1%2f..%2fpause",
    "GET /%2fpause",
    "GET /%2570ause",
    "POST /%2570ause",
    "GET /pause%2f",
    "GET /%5cpause",
    "GET /v1/models/../../pause",
    "POST /v1/completions/../../pause",
    "POST /v1/completions/%2e%2e/%2e%2e/pause",
    "POST /v1/completions%00/pause",
    "POST /PAUSE",
    "POST /pause%20",
    "POST /pause;x",
    "POST /tokenize/../pause",
    "GET //v1/unload_lora_adapter",
    "GET /collective_rpc/",
    "POST /collective_rpc/",
    "POST /_sim/faults",
    "DELETE /_sim/faults",
    "POST /start_profile",
    "POST /scale_elastic_ep",
    "POST /reset_mm_cache",
    "POST /unknown",
)
"""None of these is an endpoint of lorafleet, nor a GET that can only read."""


async def raw(port: int, line: str, *headers: str) -> bytes:
    """The answer to one request, as it is written here."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "".join(f"{header}\r\n" for header in ("host: proxy.test", "connection: close", *headers))
    writer.write(f"{line} HTTP/1.1\r\n{head}content-length: 2\r\n\r\n{{}}".encode())
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def control_calls(it: Rig) -> dict[str, int]:
    return {name: sum(replica.calls[name] for replica in it.replicas) for name in CONTROL}


@pytest.mark.parametrize(
    "headers", [(), ("x-http-method-override: POST", "x-http-method: POST", "x-method-override: POST")]
)
async def test_odd_paths_and_methods(headers: tuple[str, ...], tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it, it.port() as port:
        before = control_calls(it)
        for line in ODD:
            answer = await raw(port, line, *headers)
            assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405"), (line, answer)
        for path in ("/v1/models", "/version", "/openapi.json", "/load"):
            await raw(port, f"GET {path}", *headers)
        assert control_calls(it) == before
        sent = {name for replica in it.replicas for call in replica.replica.all_headers for name in call}
        assert not any("override" in name or name == "x-http-method" for name in sent)
        assert not any(replica.replica.engine.paused for replica in it.replicas)
        await it.check()


async def test_a_get_that_only_reads_is_forwarded(tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it, it.port() as port:
        assert b" 200 " in await raw(port, "GET /openapi.json")
        assert b" 200 " in await raw(port, "GET /load?x=//a/../b")
        assert sum(replica.calls["openapi"] for replica in it.replicas) == 1


async def test_another_spelling_of_an_endpoint_is_the_endpoint(tmp_path: Path) -> None:
    """A percent sign that need not be there makes no difference: the whole fleet, or nobody."""
    async with rig(2, tmp_path) as it, it.port() as port:
        assert b" 200 " in await raw(port, "POST /%70ause?mode=keep")
        it.paused = True
        await it.check()
        assert b" 200 " in await raw(port, "POST http://elsewhere.test/resume")
        it.paused = False
        await it.check()


async def test_weight_transfer_is_refused_with_the_reason(tmp_path: Path) -> None:
    paths = (
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/collective_rpc",
    )
    async with rig(2, tmp_path) as it:
        before = control_calls(it)
        for path in paths:
            answer = await it.ask("POST", path, {})
            assert (answer.status, answer.json()["error"]["code"]) == (501, 501)
            assert "LoRA" in answer.json()["error"]["message"]
        assert control_calls(it) == before


@pytest.mark.parametrize(
    "line",
    [
        "GET /fleet?after=²",
        "GET /fleet?after=--5",
        f"GET /fleet?after={'9' * 5000}",
        "POST /fleet/replicas/%C2%B2/drain",
        f"POST /fleet/replicas/{'9' * 5000}/drain",
        "DELETE /fleet/replicas/-1",
        "DELETE /fleet/replicas/",
        "POST /fleet/replicas/0/drain/drain",
        "POST /pause?mode=%ff%fe",
        "POST /pause?mode=a b",
        "POST /fleet/replicas",
    ],
)
async def test_odd_arguments_are_the_clients_fault(line: str, tmp_path: Path) -> None:
    method, _, target = line.partition(" ")
    async with rig(1, tmp_path) as it:
        answer = await it.ask(method, target, {} if method == "POST" else None)
        assert answer.status is not None and answer.status < 500, answer
        await it.check()


@pytest.mark.parametrize("host", ["[", "a/b?c#d", "x:99999999", "\\", "", "a b"])
async def test_a_host_header_changes_nothing(host: str, tmp_path: Path) -> None:
    """What is broadcast is the query of the request line, whatever Host says."""
    async with rig(2, tmp_path) as it, it.port() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /pause?mode=keep HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
        it.paused = b" 200 " in answer
        assert it.paused or b" 400 " in answer, answer
        await it.check()
