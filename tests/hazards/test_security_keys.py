"""With an API key, nobody without it reaches a replica or a view; the key itself goes nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from proxy.config import Options, build
from proxy.errors import ConfigError
from proxy.web.app import OPEN, ROUTED, TO_ANY
from tests.faults.rig import Rig, quick, rig  # noqa: F401

KEY = "client-key-77e1"


def everything(it: Rig) -> list[tuple[str, str]]:
    """Every method and path that the proxy knows, and some that it does not."""
    control = it.app._control.routes
    own = it.app._fleet_api.routes
    routes = {*own, *(("POST", path) for path in (*control, *ROUTED, *TO_ANY))}
    more = {
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("DELETE", "/fleet/replicas/0"),
        ("POST", "/fleet/replicas/0/drain"),
    }
    return sorted((routes | more) - OPEN)


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    import tests.faults.rig as module

    real = module.build

    def with_key(urls: object, options: object, *, environment: dict[str, str]) -> object:
        return real(urls, options, environment={**environment, "LORAFLEET_API_KEY": KEY})  # type: ignore[arg-type]

    monkeypatch.setattr(module, "build", with_key)


WRONG = [
    [],
    [(b"authorization", b"Bearer wrong")],
    [(b"authorization", f"Bearer {KEY}x".encode())],
    [(b"authorization", f"Bearer {KEY[:-1]}".encode())],
    [(b"authorization", f"Basic {KEY}".encode())],
    [(b"authorization", b"Bearer")],
    [(b"authorization", b"")],
    [(b"x-api-key", b"wrong")],
    [(b"authorization", b"Bearer wrong"), (b"authorization", f"Bearer {KEY}".encode())],
    [(b"cookie", f"key={KEY}".encode())],
]


@pytest.mark.parametrize("headers", WRONG)
async def test_without_the_key(key: None, headers: list[tuple[bytes, bytes]], tmp_path: Path) -> None:
    async with rig(1, tmp_path) as it:
        await it.until(lambda: not it.parts.plane.busy, "idle")
        routes = (
            "completion",
            "load",
            "unload",
            "pause",
            "resume",
            "reset",
            "openapi",
            "docs",
            "tokenize",
            "server_info",
        )
        before = [it.replicas[0].calls[name] for name in routes]
        for method, path in everything(it):
            answer = await it.ask(method, path, {} if method == "POST" else None, headers=headers)
            assert answer.status == 401, (method, path)
            assert answer.json()["error"]["code"] == 401
        for method, path in OPEN:
            answer = await it.ask(method, path, headers=headers)
            assert answer.status == 200
        assert [it.replicas[0].calls[name] for name in routes] == before
        it.check_secrets()


@pytest.mark.parametrize(
    "header",
    [
        (b"authorization", f"Bearer {KEY}".encode()),
        (b"authorization", f"bearer  {KEY} ".encode()),
        (b"x-api-key", KEY.encode()),
    ],
)
async def test_with_the_key(
    key: None, header: tuple[bytes, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with rig(1, tmp_path) as it:
        body = {"model": "base", "prompt": [1, 2, 3], "max_tokens": 2}
        assert (await it.ask("POST", "/v1/completions", body, headers=[header])).ok
        fleet = await it.ask("GET", "/fleet", headers=[header])
        assert KEY not in fleet.text + caplog.text
        assert KEY not in str(it.replicas[0].replica.all_headers)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.7.7", "a-host-name", "example.test"])
def test_other_machines_need_a_key(host: str, tmp_path: Path) -> None:
    urls, options = ["http://127.0.0.1:9"], Options(host=host, state_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="LORAFLEET_API_KEY"):
        build(urls, options, environment={})
    assert build(urls, options, environment={"LORAFLEET_API_KEY": KEY}).api_key is not None
    assert build(urls, Options(host=host, insecure_no_auth=True), environment={}).api_key is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.9.9.9"])
def test_this_machine_needs_none(host: str) -> None:
    assert build(["http://127.0.0.1:9"], Options(host=host), environment={}).api_key is None
