"""The rows of `benchmarks.reuse`: which rollouts, on how many replicas, of what speed. Same seeds, same rows."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from benchmarks.offline_fleet import CPU, GPU, Speed
from benchmarks.offline_workloads import Rollout, Workload, grouped
from proxy.simulator.prefix_cache import chain_hashes, chain_seed

BLOCK = 16
GROUP = 8
PUBLISH_EVERY = 200
ANSWER = 48
"""Answers end by themselves, after half to one and a half of this many tokens; nobody is told before."""
GROUPS = {2: 48, 4: 96, 8: 128, 64: 256}
"""Groups of eight rollouts in a row, by replicas."""
FASTER = {2: 12.0, 4: 8.0, 8: 5.0, 64: 1.2}
"""By how much the replicas' clocks are sped up: so that one core keeps up with the requests of all of them."""
ROOMY = 100_000
"""Blocks of a cache that never fills."""


@dataclass(frozen=True, slots=True)
class Row:
    """A workload and the fleet that serves it.

    `capacity` is a replica's cache in blocks; `slow`: the first replica is half as fast; `publish`: the workload's
    adapters are published while it runs.
    """

    workload: Workload
    replicas: int
    concurrency: int
    faster: float
    speed: Speed = GPU
    capacity: int = ROOMY
    slow: bool = False
    publish: bool = False

    @property
    def name(self) -> str:
        return self.workload.name


def working_set(workload: Workload, answer: int = ANSWER) -> int:
    """Different blocks that the workload ever fills, with answers of `answer` tokens."""
    first: set[bytes] = set()
    later = 0
    for rollout in workload.rollouts:
        prompt = rollout.turns[0].tokens
        first.update(chain_hashes(chain_seed(rollout.model, None), prompt, BLOCK))
        whole = sum(len(turn.tokens) + answer for turn in rollout.turns)
        later += whole // BLOCK - len(prompt) // BLOCK
    return len(first) + later


def plain(workload: Workload) -> Workload:
    """The same rollouts without adapters."""
    return Workload(workload.name, [Rollout("base", each.turns) for each in workload.rollouts], workload.goal)


def published(groups: int, *, every: int = PUBLISH_EVERY, seed: int = 5, name: str = "mixed adapters") -> Workload:
    """Groups under the newest adapter, one in four under the one before (rollouts that are a version behind); a new
    version every `every` requests."""
    random = Random(seed)
    rollouts: list[Rollout] = []
    version = 1
    for at, rollout in enumerate(grouped(groups, group=GROUP, seed=seed).rollouts):
        if at % GROUP == 0:
            version = max(1, at // every + 1 - (random.random() < 0.25))
        rollouts.append(Rollout(f"policy-v{version}", rollout.turns))
    return Workload(name, rollouts)


def rows(replicas: int) -> list[Row]:
    """The rows about reuse and balance, for a fleet of 2, 4, 8 or 64: eight rollouts in flight for each replica."""
    groups, each, faster = GROUPS[replicas], GROUP * replicas, FASTER[replicas]
    trees = grouped(groups // 2, turns=4, seed=2, name="four-turn trees", goal=0.985)
    # Two turns, the members of 4 groups a replica in random order: what is in use fills four fifths of the caches.
    two = grouped(groups, turns=2, interleave=4 * replicas, seed=3, name="caches a tenth", goal=0.985)
    tenth = working_set(two) // (10 * replicas)
    found = [
        Row(plain(grouped(groups, name="grouped rollouts")), replicas, each, faster),
        Row(plain(grouped(groups, interleave=8, seed=4, name="interleaved groups")), replicas, each, faster),
        Row(plain(trees), replicas, each, faster),
        Row(
            plain(grouped(groups, length=2600, shared=2000, seed=6, name="2,000-token preamble")),
            replicas,
            each,
            faster,
        ),
        Row(published(groups), replicas, each, faster, publish=True),
    ]
    # On 64 replicas a tenth of so few requests' blocks would not even hold what runs.
    longest = max(sum(len(turn.tokens) + turn.answer for turn in each.turns) for each in two.rollouts)
    if tenth * BLOCK >= longest * GROUP // 2:
        found.append(Row(plain(two), replicas, each // 2, 1.6 * faster, capacity=tenth))
    return found


def pays(replicas: int = 4) -> list[Row]:
    """The rows about wall time: a batch slows its replica much (decode 0.8 slower for each further request), or one
    replica is half as fast."""
    found = []
    for concurrency in (8, 32):
        one = grouped(64, name=f"grouped, {concurrency} in flight")
        trees = grouped(16, turns=4, seed=2, name=f"trees, {concurrency} in flight")
        found += [Row(plain(workload), replicas, concurrency, 40.0, CPU) for workload in (one, trees)]
    found.append(Row(plain(grouped(96, name="one replica half as fast")), replicas, 32, 8.0, slow=True))
    return found
