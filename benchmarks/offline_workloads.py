"""Workloads for the offline benchmark: rollouts of one or more turns, as an RL trainer sends them."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Turn:
    """What the client adds to the conversation before it asks, and how many tokens the answer has."""

    tokens: list[int]
    answer: int


@dataclass(frozen=True, slots=True)
class Rollout:
    """One conversation; a further turn is asked when the answer of the last one is there."""

    model: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts in the order in which the client begins them."""

    name: str
    rollouts: list[Rollout]
    goal: float = 0.99


def grouped(
    prompts: int,
    *,
    group: int = 8,
    length: int = 600,
    shared: int = 48,
    turns: int = 1,
    answer: int = 48,
    models: int = 1,
    publish_every: int = 0,
    interleave: int = 1,
    seed: int = 1,
    name: str = "grouped",
    goal: float = 0.99,
) -> Workload:
    """`prompts` prompts of `length` tokens that share their first `shared`, each asked `group` times.

    The members of `interleave` groups are sent in random order; the model is renamed every `publish_every` requests.
    """
    random = Random(seed)
    preamble = [random.randrange(3, 150_000) for _ in range(shared)]
    groups = []
    for _ in range(prompts):
        own = [random.randrange(3, 150_000) for _ in range(length - shared)]
        groups.append(
            [
                tuple(
                    Turn(
                        preamble + own if turn == 0 else [random.randrange(3, 150_000) for _ in range(200)],
                        max(4, round(answer * random.uniform(0.5, 1.5))),
                    )
                    for turn in range(turns)
                )
                for _ in range(group)
            ]
        )
    order = []
    for start in range(0, prompts, interleave):
        some = groups[start : start + interleave]
        window = [conversation for members in some for conversation in members]
        if interleave > 1:
            random.shuffle(window)
        order.extend(window)
    rollouts = []
    for at, conversation in enumerate(order):
        model = f"policy-v{at // publish_every + 1}" if publish_every else f"policy-{at // group % models}"
        rollouts.append(Rollout(model, conversation))
    return Workload(name, rollouts, goal)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the comparison: a workload and the fleet that serves it.

    `tenth`: caches hold a tenth of all blocks that the workload ever has. `slow`: the first replica is half as fast.
    """

    workload: Workload
    replicas: int = 4
    concurrency: int = 32
    tenth: bool = False
    slow: bool = False


def rows(prompts: int = 96) -> list[Row]:
    """The rows of the comparison."""
    plain = grouped(prompts, name="grouped rollouts")
    trees = grouped(prompts // 2, turns=4, name="four-turn trees", goal=0.985)
    again = Workload("the same prompts twice", plain.rollouts + plain.rollouts)
    return [
        *(Row(plain, concurrency=concurrency) for concurrency in (8, 32, 128)),
        Row(grouped(prompts, interleave=8, name="interleaved groups")),
        *(Row(trees, concurrency=concurrency) for concurrency in (8, 32, 128)),
        Row(grouped(prompts // 2, turns=4, interleave=8, name="interleaved trees", goal=0.985), tenth=True),
        Row(again, tenth=True),
        Row(grouped(prompts, length=2600, shared=2000, name="2,000-token preamble")),
        Row(grouped(prompts, publish_every=200, name="a publish every 200")),
        Row(grouped(prompts, models=4, name="four adapters")),
        *(
            Row(grouped(1, group=prompts * 4, name="one hot group"), concurrency=concurrency)
            for concurrency in (8, 32, 128)
        ),
        Row(plain, slow=True),
        Row(trees, slow=True),
        Row(plain, replicas=2, concurrency=8),
        Row(plain, replicas=2, concurrency=16),
        Row(grouped(2 * prompts, name="grouped rollouts"), replicas=8, concurrency=64),
        Row(grouped(4 * prompts, name="grouped rollouts"), replicas=64, concurrency=512),
    ]
