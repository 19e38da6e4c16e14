"""What a replica, or a gateway before it, writes into an error may hold its address and the token it was sent. Neither
goes on to whoever asked for a change."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.simulator import SimReplica
from tests.faults.rig import CANARY, Rig, quick, rig  # noqa: F401

CALLS = {
    "load": ("POST", "/v1/load_lora_adapter"),
    "unload": ("POST", "/v1/unload_lora_adapter"),
    "pause": ("POST", "/pause?mode=keep"),
    "resume": ("POST", "/resume"),
    "reset": ("POST", "/reset_prefix_cache"),
    "abort": ("POST", "/abort_requests"),
    "sleep": ("POST", "/sleep?level=1"),
    "wake_up": ("POST", "/wake_up"),
}


def _json(words: str) -> tuple[int, bytes]:
    return 500, json.dumps({"error": {"message": words, "type": "x", "param": None, "code": 500}}).encode()


def _detail(words: str) -> tuple[int, bytes]:
    return 401, json.dumps({"detail": words}).encode()


def _page(words: str) -> tuple[int, bytes]:
    return 502, f"<html>bad gateway: {words}</html>".encode()


def _lie(words: str) -> tuple[int, bytes]:
    return 200, f"ok {words}".encode()


def talkative(replica: SimReplica, path: str, answer: Callable[[str], tuple[int, bytes]]) -> None:
    """From now on `path` is answered with everything that the call knew."""
    inner = replica.http.app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != path:
            await inner(scope, receive, send)
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        sent = headers.get("authorization", "")
        words = f"upstream {replica.url}{path} at {headers['host']} refused {sent} and token {sent[7:]}"
        status, body = answer(words)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    replica.http.app = app


async def prepare(it: Rig, call: str) -> Any:
    """The state in which the call makes sense, and its body."""
    await it.must_load("a", it.library.path(1))
    if call == "resume":
        assert (await it.pause()).ok
    if call == "wake_up":
        assert (await it.ask("POST", "/sleep?level=1")).ok
    if call == "load":
        return {"lora_name": "b", "lora_path": str(it.library.path(2))}
    return {"lora_name": "a"} if call == "unload" else None


@pytest.mark.parametrize("answer", [_json, _detail, _page, _lie])
@pytest.mark.parametrize("call", CALLS)
async def test_a_replica_that_tells_all(
    call: str, answer: Callable[[str], tuple[int, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    method, target = CALLS[call]
    async with rig(2, tmp_path) as it:
        body = await prepare(it, call)
        talkative(it.replicas[1], target.partition("?")[0], answer)
        await it.ask(method, target, body)
        it.check_secrets()
        views = [await it.ask("GET", path) for path in ("/fleet", "/metrics", "/", "/health", "/v1/models")]
    shown = caplog.text + "".join(view.text + str(view.headers) for view in views)
    assert CANARY not in shown


async def test_what_is_read_of_a_replica(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Health checks, lists and facts that answer with the token: it is in no view and no log."""
    caplog.set_level(logging.DEBUG)
    async with rig(2, tmp_path) as it:
        for path in ("/health", "/v1/models", "/is_paused", "/server_info", "/version"):
            talkative(it.replicas[1], path, _json)
        await it.until(lambda: it.parts.fleet.replicas[1].last_error, "seen to be ill")
        views = [await it.ask("GET", path) for path in ("/fleet", "/metrics", "/server_info?config_format=json")]
        assert CANARY not in caplog.text + "".join(view.text for view in views)
        it.check_secrets()
