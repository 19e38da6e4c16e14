from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainer_client.fake_fleet import FakeFleet, error_body
from trainer_client import client as module
from trainer_client.client import FleetClient
from trainer_client.errors import FleetError, FleetRefused, FleetUnreachable, ReplicaAnswer

SECRET = "canary-5f1e9b"


@pytest.fixture
def client(fleet: FakeFleet) -> Iterator[FleetClient]:
    with FleetClient(fleet.url) as running:
        yield running


def once(answer: Any) -> Any:
    """A `before` that misbehaves on the first call only."""
    left = [answer]
    return lambda path, body: left.pop() if left else None


def test_load_and_unload(fleet: FakeFleet, client: FleetClient) -> None:
    client.load("a", "/r/a", "sha256:1")
    client.load("b", "/r/b")
    assert fleet.asked("/v1/load_lora_adapter") == [
        {"lora_name": "a", "lora_path": "/r/a", "load_inplace": False, "digest": "sha256:1"},
        {"lora_name": "b", "lora_path": "/r/b", "load_inplace": False},
    ]
    assert client.adapters() == {"a", "b"}
    assert client.unload("a") is True
    assert client.unload("a", missing_ok=True) is False
    with pytest.raises(FleetRefused, match="cannot be found") as raised:
        client.unload("a")
    assert raised.value.status == 404
    with pytest.raises(ValueError, match="relative"):
        client.load("c", "some/adapter")


def test_pause_resume_and_the_block_between(fleet: FakeFleet, client: FleetClient) -> None:
    client.pause()
    assert fleet.paused
    client.resume()
    with pytest.raises(KeyError), client.paused("wait"):
        assert fleet.paused
        raise KeyError
    assert not fleet.paused


def test_a_pause_whose_answer_is_lost_is_ended(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.before = lambda path, body: "lost" if path == "/pause" else None
    with pytest.raises(FleetUnreachable), client.paused():
        raise AssertionError("not reached")
    assert not fleet.paused


def test_a_reset_that_did_nothing_is_a_refusal(fleet: FakeFleet, client: FleetClient) -> None:
    with pytest.raises(FleetRefused, match="nothing was reset"):
        client.reset_prefix_cache()
    client.reset_prefix_cache(reset_running_requests=True)


def test_looks(fleet: FakeFleet, client: FleetClient) -> None:
    assert client.status()["replicas"][0]["state"] == "ready"
    assert client.models()[0]["max_model_len"] == 4096
    assert (client.limits().max_loras, client.limits().max_lora_rank) == (8, 16)
    assert client.health() == module.Health(True, 200, {"ready": 1, "total": 1})


def test_a_plain_server_has_no_fleet_view(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.plain_vllm = True
    client.load("a", "/r/a")
    assert client.adapters() == {"a"}
    fleet.before = lambda path, body: (404, "{}") if path == "/server_info" else None
    assert client.limits().max_loras is None


@pytest.mark.parametrize("how", ["reset", "lost"])
def test_broken_connections_are_tried_again(fleet: FakeFleet, client: FleetClient, how: str) -> None:
    for call in (lambda: client.load("a", "/r/a", "d"), client.pause, client.resume, client.status):
        fleet.before = once(how)
        call()
    fleet.before = once(how)
    assert client.unload("a") is (how == "reset")
    assert fleet.adapters == {}


def test_a_plain_server_that_did_load_at_the_first_try(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.plain_vllm = True
    fleet.before = once("lost")
    client.load("a", "/r/a")
    with pytest.raises(FleetRefused, match="already been loaded"):
        client.load("a", "/r/a")


def test_it_gives_up_after_a_few_tries(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.before = lambda path, body: "reset"
    with pytest.raises(FleetUnreachable, match=r"127\.0\.0\.1"):
        client.load("a", "/r/a")
    assert len(fleet.calls) == module._TRIES


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with FleetClient(url) as client, pytest.raises(FleetUnreachable):
            client.resume()


def test_a_look_that_takes_too_long_is_not_repeated(fleet: FakeFleet) -> None:
    import threading

    release = threading.Event()
    fleet.before = lambda path, body: release.wait(20) and None
    try:
        with FleetClient(fleet.url, timeout=0.05) as client, pytest.raises(FleetUnreachable):
            client.status()
        assert len(fleet.calls) == 1
    finally:
        release.set()


def test_refusals_carry_what_replicas_said(fleet: FakeFleet, client: FleetClient) -> None:
    replicas = [{"replica": 0, "status": 200, "message": "undone"}, {"replica": 1, "status": 500, "message": "broken"}]
    fleet.before = lambda path, body: (502, error_body(502, "not loaded", replicas=replicas))
    with pytest.raises(FleetRefused) as raised:
        client.load("a", "/r/a")
    assert (raised.value.status, raised.value.message) == (502, "not loaded")
    assert raised.value.replicas == (ReplicaAnswer(0, 200, "undone"), ReplicaAnswer(1, 500, "broken"))


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateways_own_answer_is_no_answer_of_the_fleet(fleet: FakeFleet, client: FleetClient, status: int) -> None:
    fleet.before = lambda path, body: (status, "<html>Bad Gateway</html>")
    with pytest.raises(FleetUnreachable, match=str(status)):
        client.load("a", "/r/a")


def test_no_redirect_is_followed(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.before = lambda path, body: (307, "")
    with pytest.raises(FleetRefused, match="redirect"):
        client.load("a", "/r/a")
    assert len(fleet.calls) == 1


def test_the_key_goes_out_and_is_never_shown(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet.key = SECRET
    with FleetClient(fleet.url) as client, pytest.raises(FleetRefused, match="LORAFLEET_API_KEY: not set"):
        client.status()
    monkeypatch.setenv("LORAFLEET_API_KEY", f"{SECRET}\n")
    with FleetClient(fleet.url) as client:
        client.status()
        assert SECRET not in repr(client)
        fleet.before = lambda path, body: (400, error_body(400, f"odd header Bearer {SECRET}"))
        with pytest.raises(FleetRefused) as raised:
            client.status()
        assert SECRET not in str(raised.value) and "***" in str(raised.value)
        fleet.before = lambda path, body: "reset"
        with pytest.raises(FleetError) as lost:
            client.status()
        assert SECRET not in str(lost.value)
    assert fleet.headers[-1]["authorization"] == f"Bearer {SECRET}"


def test_a_key_that_no_header_can_carry_is_not_shown_either() -> None:
    for key in (f"{SECRET}\nx", f"{SECRET}ä", f"a {SECRET}"):
        with pytest.raises(ValueError) as raised:
            FleetClient(api_key=key)
        assert SECRET not in str(raised.value)


@pytest.mark.parametrize("url", ["", "host:8000", "ftp://h", "http://", "http://h/?q=1", f"user:{SECRET}@h"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="url") as raised:
        FleetClient(url)
    assert SECRET not in str(raised.value)


def test_a_password_in_the_address_is_not_shown() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://user:{SECRET}@127.0.0.1:{taken.getsockname()[1]}"
        with FleetClient(url) as client:
            assert SECRET not in repr(client)
            with pytest.raises(FleetUnreachable) as raised:
                client.status()
        assert SECRET not in str(raised.value)


def test_proxies_of_the_environment_are_not_used(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with FleetClient(fleet.url) as client:
        client.status()


def test_waiting_until_it_serves(fleet: FakeFleet, client: FleetClient) -> None:
    fleet.before = once((503, {"ready": 0, "total": 1}))
    assert client.wait_ready(timeout=30, poll=0.001).ok
    fleet.before = lambda path, body: (503, {"ready": 0, "total": 1})
    with pytest.raises(FleetUnreachable, match="'total': 1"):
        client.wait_ready(timeout=0.02, poll=0.001)
    fleet.before = lambda path, body: "reset"
    with pytest.raises(FleetUnreachable, match="not ready after"):
        client.wait_ready(timeout=0.02, poll=0.001)
