"""What the proxy counts, and how it looks to a scraper."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from proxy.control.desired import Adapter, Pause
from proxy.control.facts import Facts
from proxy.control.records import TransactionRecord
from proxy.fleet import Fleet
from proxy.lease import Lease, Usage
from proxy.metrics import Metrics, Tally
from proxy.replica_state import Event
from proxy.routing.request import parse
from proxy.routing.router import Decision, Router
from proxy.upstream.transport import Endpoint
from proxy.web.history import Reading
from proxy.web.observe import Observer, Outcome

FACTS = Facts(base_models=("base",), base_root="/m", max_model_len=4096, block_size=16, kv_capacity_tokens=100_000)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet([Endpoint(f"http://r{index}", lambda: "t0ken") for index in range(count)], Router())
    for replica in fleet.members():
        fleet.learn(replica.index, FACTS)
        fleet.apply(replica.index, Event.CAUGHT_UP)
    return fleet


def held(fleet: Fleet) -> Lease:
    body = b'{"model": "base", "prompt": [%s]}' % b",".join(b"%d" % token for token in range(64))
    return fleet.lease(parse("/v1/completions", body), None)


def outcome(decision: Decision | None = None, **changes: object) -> Outcome:
    known: dict[str, object] = {
        "path": "/v1/completions",
        "status": 200,
        "replica": decision.replica if decision is not None else None,
        "decision": decision,
        "served": None,
        "usage": None,
        "response_id": None,
        "request_bytes": 100,
        "response_bytes": 200,
        "waited_secs": 0.0,
        "first_byte_secs": 0.3,
        "total_secs": 3.0,
        "attempts": 1,
        "left": False,
        "cut": False,
    }
    return Outcome(**{**known, **changes})  # type: ignore[arg-type]


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name and labels as text, without the process's own and without empty buckets."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name.removeprefix('lorafleet_')}{{{labels}}}"] = sample.value
    return found


def test_a_request_is_counted_by_route_replica_and_status() -> None:
    fleet = fleet_of(1)
    metrics = Metrics(fleet)
    observer: Observer = metrics
    lease = held(fleet)
    observer.finished(outcome(lease.decision))
    observer.finished(outcome(lease.decision, status=503, first_byte_secs=None, total_secs=0.2))
    observer.finished(outcome(status=None, first_byte_secs=None, total_secs=0.01, cut=True))
    got = samples(metrics)
    assert got["requests_total{replica=0,route=new,status=2xx}"] == 1
    assert got["requests_total{replica=0,route=new,status=5xx}"] == 1
    assert got["requests_total{replica=none,route=none,status=0xx}"] == 1
    assert got["time_to_first_byte_seconds_count{route=new}"] == 1
    assert got["time_to_first_byte_seconds_bucket{le=0.2,route=new}"] == 0
    assert got["time_to_first_byte_seconds_bucket{le=0.4,route=new}"] == 1
    assert got["request_seconds_sum{route=new}"] == 3.2
    assert got["request_seconds_bucket{le=+Inf,route=new}"] == 2
    assert got["answers_cut_total{}"] == 1


def test_prompt_tokens_count_only_where_reuse_is_known() -> None:
    metrics = Metrics(fleet_of(1))
    for usage, cut in (
        (Usage(prompt_tokens=100, cached_tokens=64), False),
        (Usage(prompt_tokens=100), False),
        (None, False),
        (Usage(prompt_tokens=100, cached_tokens=64), True),
    ):
        metrics.finished(outcome(usage=usage, cut=cut))
    assert samples(metrics)["prompt_tokens_total{}"] == metrics.prompt_tokens == 100


def test_aborts_retries_and_waiting() -> None:
    metrics = Metrics(fleet_of(1))
    metrics.client_left("waiting")
    metrics.client_left("streaming")
    metrics.client_left("streaming")
    metrics.retried(0, "connection refused")
    metrics.waiting(7)
    metrics.waiting(3)
    got = samples(metrics)
    assert got["client_aborts_total{phase=streaming}"] == 2
    assert got["client_aborts_total{phase=waiting}"] == 1
    assert got["retries_total{replica=0}"] == 1
    assert got["waiting_requests{}"] == 3


def test_the_fleet_is_read_when_it_is_scraped() -> None:
    fleet = fleet_of(2)
    metrics = Metrics(fleet)
    lease = held(fleet)
    fleet.apply(1 - lease.replica.index, Event.PROBE_FAILED, "refused")
    bound = fleet.desired.bind(Adapter("p-v1", "/a", None, "p-v1")).bind(Adapter("p-v1", "/b", None, "p-v1@1"))
    fleet.commit(bound.with_pause(Pause("mode=keep", 0.0, real=False)))
    got = samples(metrics)
    assert got[f"in_flight{{replica={lease.replica.index}}}"] == 1
    assert got[f"in_flight{{replica={1 - lease.replica.index}}}"] == 0
    assert got[f"replica_state{{replica={1 - lease.replica.index},state=down}}"] == 1
    assert [value for name, value in got.items() if name.startswith("replica_state")].count(1) == 2
    assert got["adapters{state=committed}"] == got["adapters{state=retiring}"] == got["paused{}"] == 1
    assert got["decisions_total{route=new}"] == 1
    assert got["index_blocks{}"] > 0
    lease.release(ok=True, usage=Usage(prompt_tokens=64, cached_tokens=48, output_tokens=1))
    got = samples(metrics)
    assert got[f"in_flight{{replica={lease.replica.index}}}"] == 0
    assert got["actual_cached_tokens_total{}"] == 48
    assert got["predicted_cached_tokens_total{}"] == 0


def test_a_reading_for_the_page() -> None:
    fleet = fleet_of(2)
    metrics = Metrics(fleet)
    held(fleet)
    metrics.waiting(4)
    reading = metrics.reading()
    assert reading == Reading((0, 0, 1, 0), in_flight=1, waiting=4, ready=2, blocks=reading.blocks)


def test_transactions_by_kind_outcome_and_phase() -> None:
    metrics = Metrics(fleet_of(1))
    metrics.transaction(TransactionRecord(1, "load", "p-v1", "committed", 0.0, 0.5, (("queue", 0.0), ("load", 0.5))))
    metrics.transaction(TransactionRecord(2, "load", "p-v2", "undone", 0.0, 4.0, (("load", 4.0),), "no"))
    metrics.pause_lease_expired()
    metrics.loop_lag(0.003)
    got = samples(metrics)
    assert got["transactions_total{kind=load,outcome=committed}"] == 1
    assert got["transactions_total{kind=load,outcome=undone}"] == 1
    assert got["transaction_phase_seconds_sum{kind=load,phase=load}"] == 4.5
    assert got["transaction_phase_seconds_bucket{kind=load,le=1.0,phase=load}"] == 1
    assert got["pause_lease_expiries_total{}"] == 1
    assert got["event_loop_lag_seconds_bucket{le=0.002}"] == 0
    assert got["event_loop_lag_seconds_bucket{le=0.005}"] == 1
    assert not any("p-v1" in name for name in got)


def test_every_family_has_the_prefix_and_no_secret() -> None:
    metrics = Metrics(fleet_of(2))
    text = metrics.render().decode()
    assert all(line.split(" ")[2].startswith("lorafleet_") for line in text.splitlines() if line.startswith("#"))
    assert "t0ken" not in text and "http://" not in text


def test_a_tally_puts_a_bound_into_its_own_bucket() -> None:
    tally = Tally((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        tally.add(value)
    assert tally.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert tally.sum == 5.5
