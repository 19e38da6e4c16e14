"""Rates are learned from answers, load returns to zero."""

import random

import pytest

from proxy.routing.load import MIN_ANSWERS, Moments, Rates, ReplicaLoad, Trace, fit


def learn(rates: Rates, loads: list[ReplicaLoad], slowness: list[float], answers: int, seed: int = 1) -> None:
    """Answers of replicas that follow the model with 0.1 ms a prompt token, 10 ms a step and 1 ms a neighbour."""
    draw = random.Random(seed)
    for _ in range(answers):
        at = draw.randrange(len(loads))
        uncached, out, crowd = draw.choice([8, 600]), draw.uniform(16, 64), draw.uniform(1, 8)
        seconds = slowness[at] * (1e-4 * uncached + out * (1e-2 + 1e-3 * crowd)) * draw.uniform(0.97, 1.03)
        rates.learn(loads[at], seconds, uncached, out, crowd)


def test_the_three_rates_are_found() -> None:
    rates, loads = Rates(), [ReplicaLoad(), ReplicaLoad()]
    learn(rates, loads, [1.0, 1.0], 400)
    assert rates.known
    assert rates.prefill == pytest.approx(1e-4, rel=0.25)
    assert rates.step == pytest.approx(1e-2, rel=0.15)
    assert rates.crowd == pytest.approx(1e-3, rel=0.3)
    assert [load.speed for load in loads] == pytest.approx([1.0, 1.0], abs=0.1)


def test_a_slow_replica_is_seen_and_speeds_do_not_drift() -> None:
    rates, loads = Rates(), [ReplicaLoad() for _ in range(4)]
    learn(rates, loads, [1.0, 2.0, 1.0, 1.0], 4000)
    fastest = min(load.speed for load in loads)
    assert loads[1].speed / fastest == pytest.approx(2.0, rel=0.2)
    assert 0.5 < fastest < 1.5


def test_answers_that_are_all_alike_do_not_blame_the_crowd() -> None:
    rates, load = Rates(), ReplicaLoad()
    for _ in range(20):
        rates.learn(load, 1.0, 8, 50, 8.0)
    assert rates.crowd * 8 < 0.2 * rates.step


def test_little_is_known_before_some_answers() -> None:
    rates, load = Rates(), ReplicaLoad()
    for _ in range(MIN_ANSWERS - 1):
        rates.learn(load, 1.0, 8, 50, 8.0)
    assert not rates.known
    rates.learn(load, 0.0, 8, 50, 8.0)  # an answer in no time says nothing
    assert not rates.known


def test_no_rate_is_negative() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        moments = [0.0] * 9
        for _ in range(6):
            x, y, z = (draw.uniform(0, 1) for _ in range(3))
            for at, value in enumerate((x * x, x * y, x * z, y * y, y * z, z * z, x, y, z)):
                moments[at] += value
        assert min(fit(_nine(moments))) >= 0.0
    assert fit(_nine([0.0] * 9)) == (0.0, 0.0, 0.0)


def _nine(values: list[float]) -> Moments:
    xx, xy, xz, yy, yz, zz, x, y, z = values
    return xx, xy, xz, yy, yz, zz, x, y, z


def test_the_queue_drains_with_time_and_with_answers() -> None:
    rates, load = Rates(prefill=1e-3), ReplicaLoad()
    one, two = Trace(uncached=1000, load=load), Trace(uncached=500, load=load)
    load.begin(one, rates, 10.0)
    load.begin(two, rates, 10.0)
    assert load.pending(rates, 10.0) == pytest.approx(1.5)
    assert load.pending(rates, 11.0) == pytest.approx(0.5)
    load.answered(one)
    assert load.pending(rates, 10.0) == pytest.approx(0.5)
    assert load.finish(one, rates, 12.0) == (1500, 2.0)
    load.finish(two, rates, 12.0)
    assert (load.sequences, load.requests, load.uncached, load.queued) == (0, 0, 0, 0)


def test_a_wrong_rate_does_not_leave_a_queue_behind() -> None:
    rates, load = Rates(prefill=100.0), ReplicaLoad()
    trace = Trace(uncached=1000, load=load)
    load.begin(trace, rates, 0.0)
    rates.prefill = 1e-4
    assert load.pending(rates, 0.0) == pytest.approx(0.1)
    load.finish(trace, rates, 1.0)
    assert load.pending(rates, 1.0) == 0.0
