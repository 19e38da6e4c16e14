"""GET /fleet, built from a fleet that a test made."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proxy.control.desired import Adapter, Pause
from proxy.control.facts import Facts
from proxy.control.records import TransactionRecord
from proxy.fleet import Fleet
from proxy.replica_state import Event
from proxy.routing.request import RouteRequest
from proxy.routing.router import Router
from proxy.upstream.transport import Endpoint
from proxy.web.fleet_view import MAX_TEXT, MAX_TRANSACTIONS, Settings, fleet_view, is_healthy, shown_url
from proxy.web.history import Reading

TOKEN = "hf_c4nary"
SETTINGS = Settings("0.1.0", "prefix", "eager", min_ready=2, pause_lease_secs=600)
FACTS = Facts(
    base_models=("base",),
    base_root="/m",
    max_model_len=4096,
    version="0.27.1",
    block_size=16,
    kv_capacity_tokens=32_000,
    max_loras=4,
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet_of(*bases: str) -> tuple[Fleet, Clock]:
    clock = Clock()
    return Fleet([Endpoint(base, lambda: TOKEN) for base in bases], Router(), clock=clock), clock


def ready(fleet: Fleet, *indices: int) -> None:
    for index in indices:
        fleet.learn(index, FACTS)
        fleet.apply(index, Event.CAUGHT_UP)


def view(fleet: Fleet, reading: Reading | None = None, **options: Any) -> dict[str, Any]:
    return fleet_view(fleet, SETTINGS, reading or Reading(), **{"started": 90.0, "wall": 1000.0, **options})


def test_the_whole_view_of_a_small_fleet() -> None:
    fleet, clock = fleet_of("http://a:8000", "http://b:8000/two")
    ready(fleet, 0)
    fleet.replicas[0].holds |= {"p-v1": "/a/p-v1", "left-over": None}
    fleet.commit(fleet.desired.bind(Adapter("p-v1", "/a/p-v1", "sha256:ab", "p-v1")))
    lease = fleet.lease(RouteRequest(), fleet.resolve("p-v1"))
    fleet.apply(1, Event.PROBE_FAILED, "connection refused")
    clock.now = 110.0
    record = TransactionRecord(1, "load", "p-v1", "committed", 995.0, 0.5, (("load", 0.5),))
    reading = Reading((4, 3, 2, 1), 100, 70, 60, 1, 5, 9, 1)
    row = {"t": 9}
    assert view(fleet, reading, transactions=[record], history=[row]) == {
        "version": "0.1.0",
        "now": 1000.0,
        "uptime_secs": 20.0,
        "ready": 1,
        "total": 2,
        "min_ready": 2,
        "healthy": False,
        "policy": "prefix",
        "pause_mode": "eager",
        "paused": False,
        "pause": None,
        "asleep": False,
        "replicas": [
            {
                "index": 0,
                "url": "http://a:8000",
                "state": "ready",
                "since_secs": 10.0,
                "in_flight": 1,
                "paused": False,
                "adapters": ["p-v1"],
                "others": ["left-over"],
                "last_error": None,
                "version": "0.27.1",
                "requests": 1,
                "failures": 0,
                "tainted": {},
                "block_size": 16,
                "kv_capacity_tokens": 32_000,
                "max_loras": 4,
            },
            {
                "index": 1,
                "url": "http://b:8000/two",
                "state": "down",
                "since_secs": 10.0,
                "in_flight": 0,
                "paused": False,
                "adapters": [],
                "others": [],
                "last_error": "connection refused",
                "version": None,
                "requests": 0,
                "failures": 0,
                "tainted": {},
                "block_size": None,
                "kv_capacity_tokens": None,
                "max_loras": None,
            },
        ],
        "adapters": [
            {
                "name": "p-v1",
                "path": "/a/p-v1",
                "digest": "sha256:ab",
                "state": "committed",
                "in_flight": 1,
                "upstream": "p-v1",
                "order": 1,
                "replicas": [0],
            }
        ],
        "slots": {"max_loras": 4, "listed": 1},
        "routing": {
            "decisions": {"affinity": 4, "spill": 3, "new": 2, "fallback": 1},
            "predicted_cached_tokens": 70,
            "actual_cached_tokens": 60,
            "prompt_tokens": 100,
            "blocks": 9,
            "waiting": 5,
            "in_flight": 1,
        },
        "transactions": [
            {
                "id": 1,
                "kind": "load",
                "name": "p-v1",
                "outcome": "committed",
                "started": 995.0,
                "secs": 0.5,
                "phases": [{"name": "load", "secs": 0.5}],
                "error": None,
            }
        ],
        "history": [row],
    }
    lease.release(ok=True)


def test_a_name_bound_again_is_shown_under_the_name_that_clients_say() -> None:
    fleet, _ = fleet_of("http://a")
    ready(fleet, 0)
    fleet.replicas[0].holds |= {"p-v1": "/old", "p-v1@77": "/new"}
    fleet.commit(fleet.desired.bind(Adapter("p-v1", "/old", None, "p-v1")))
    fleet.commit(fleet.desired.bind(Adapter("p-v1", "/new", None, "p-v1@77")))
    running = TransactionRecord(3, "load", "p-v1", "running", 999.0, 0.0, (("queue", 0.0),))
    shown = view(fleet, transactions=[running])
    assert [(a["name"], a["state"], a["upstream"], a["replicas"]) for a in shown["adapters"]] == [
        ("p-v1", "loading", None, []),
        ("p-v1", "committed", "p-v1@77", [0]),
        ("p-v1", "retiring", "p-v1", [0]),
    ]
    assert shown["replicas"][0]["adapters"] == ["p-v1", "p-v1"]
    assert shown["slots"] == {"max_loras": 4, "listed": 1}


def test_what_a_dead_replica_held_does_not_count() -> None:
    fleet, _ = fleet_of("http://a", "http://b")
    fleet.commit(fleet.desired.bind(Adapter("p-v1", "/old", None, "p-v1")))
    for replica in fleet.replicas:
        replica.holds["p-v1"] = "/old"
    ready(fleet, 0, 1)
    fleet.apply(1, Event.PROBE_FAILED, "refused")
    assert view(fleet)["adapters"][0]["replicas"] == [0]


def test_a_running_transaction_grows_and_the_newest_comes_first() -> None:
    fleet, _ = fleet_of("http://a")
    records = [TransactionRecord(n, "reset", None, "committed", 1.0, 0.1) for n in range(60)]
    running = TransactionRecord(60, "unload", "x", "running", 998.0, 0.25, (("queue", 0.25),))
    shown = view(fleet, transactions=[*records[30:], *records[:30], running])["transactions"]
    assert [row["id"] for row in shown] == list(range(60, 60 - MAX_TRANSACTIONS, -1))
    assert shown[0]["secs"] == 2.0
    assert shown[0]["phases"] == [{"name": "queue", "secs": 0.25}, {"name": "under way", "secs": 1.75}]


@pytest.mark.parametrize(
    ("pause", "shown"),
    [
        (Pause("mode=keep&clear_cache=false", 940.0), {"mode": "keep", "lazy": False, "age_secs": 60.0}),
        (Pause("", 1001.0, real=False), {"mode": "abort", "lazy": True, "age_secs": 0.0}),
    ],
)
def test_pause(pause: Pause, shown: dict[str, Any]) -> None:
    fleet, _ = fleet_of("http://a")
    fleet.commit(fleet.desired.with_pause(pause))
    assert view(fleet)["paused"] is True
    assert view(fleet)["pause"] == {**shown, "lease_secs": 600}
    assert fleet_view(fleet, Settings("", "", "", 1), Reading(), started=0, wall=1.0)["pause"]["lease_secs"] is None


def test_health_needs_the_minimum_once_and_one_now() -> None:
    fleet, _ = fleet_of("http://a", "http://b")
    ready(fleet, 0)
    assert not is_healthy(fleet, 2)
    ready(fleet, 1)
    fleet.apply(0, Event.PROBE_FAILED)
    assert is_healthy(fleet, 2)
    fleet.apply(1, Event.PROBE_FAILED)
    assert not is_healthy(fleet, 2)


def test_no_token_and_no_password_in_any_text() -> None:
    fleet, _ = fleet_of(f"http://user:{TOKEN}@a:8000", "http://b")
    fleet.apply(0, Event.PROBE_FAILED, f"GET http://user:pw@a:8000/x with Bearer {TOKEN} failed")
    fleet.replicas[0].tainted["p"] = f"said {TOKEN}"
    fleet.apply(1, Event.PROBE_FAILED, "y" * 10_000)
    record = TransactionRecord(1, "load", "p", "failed", 0.0, 0.0, (), f"replica 0: 500: {TOKEN}")
    shown = view(fleet, transactions=[record])
    text = msgspec.json.encode(shown).decode()
    assert TOKEN not in text and "pw@" not in text and "user" not in text
    assert shown["replicas"][0]["last_error"] == "GET http://a:8000/x with Bearer *** failed"
    assert len(shown["replicas"][1]["last_error"]) == MAX_TEXT


def test_a_token_that_cannot_be_read_hides_nothing_else() -> None:
    def broken() -> str | None:
        raise OSError("gone")

    fleet = Fleet([Endpoint("http://a", broken)], Router())
    assert view(fleet)["replicas"][0]["url"] == "http://a"


@pytest.mark.parametrize(
    ("base", "shown"),
    [
        ("http://h:8000", "http://h:8000"),
        ("https://user:p%40ss@h:8000/r0", "https://h:8000/r0"),
        ("http://a@b@h/x?token=1#f", "http://h/x"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("http://[broken", "(unreadable URL)"),
    ],
)
def test_urls_are_shown_without_credentials(base: str, shown: str) -> None:
    assert shown_url(base) == shown
