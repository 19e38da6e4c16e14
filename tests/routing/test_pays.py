"""Affinity only while it pays, on simulated engines and a virtual clock: the numbers are the same on any machine."""

from functools import cache

import pytest

from benchmarks.offline_fleet import CPU, GPU, Result, Simulation, Speed
from benchmarks.offline_workloads import grouped

GROUPS = grouped(96)
TREES = grouped(48, turns=4)


@cache
def run(policy: str, speed: Speed, replicas: int, in_flight: int, trees: bool = False, slow: bool = False) -> Result:
    return Simulation(
        TREES if trees else GROUPS,
        policy,
        replicas=replicas,
        concurrency=in_flight,
        speed=speed,
        speeds={0: 0.5} if slow else None,
    ).run()


@pytest.mark.parametrize(
    ("speed", "replicas", "in_flight", "slow"),
    [
        (CPU, 4, 8, False),  # one group is all the load, and a batch slows its replica
        (CPU, 2, 8, False),
        (CPU, 4, 32, False),
        (GPU, 4, 8, False),
        (GPU, 4, 32, False),
        (CPU, 4, 32, True),
        (GPU, 4, 32, True),
    ],
)
def test_never_slower_than_round_robin(speed: Speed, replicas: int, in_flight: int, slow: bool) -> None:
    prefix, even = (run(policy, speed, replicas, in_flight, slow=slow) for policy in ("prefix", "round_robin"))
    assert prefix.wall <= 1.01 * even.wall


@pytest.mark.parametrize("trees", [False, True])
def test_where_a_batch_costs_little_everything_is_reused(trees: bool) -> None:
    result = run("prefix", GPU, 4, 32, trees)
    assert result.ratio >= 0.995
    assert result.balance <= 1.05


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("in_flight", [8, 32, 128])
def test_two_proxies_reuse_nearly_what_one_does(trees: bool, in_flight: int) -> None:
    """Which of the two a request takes is chance, so the mean of a few."""
    alone = run("prefix", GPU, 4, in_flight, trees)
    both = [
        Simulation(
            TREES if trees else GROUPS, "prefix", replicas=4, concurrency=in_flight, speed=GPU, routers=2, seed=seed
        ).run()
        for seed in (3, 4, 5)
    ]
    assert sum(result.ratio for result in both) / 3 >= 0.98 * alone.ratio
    assert max(result.balance for result in both) <= 1.25
