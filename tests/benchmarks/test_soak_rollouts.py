"""The soak must see what it looks for: answers that are wrong in one way each."""

import time
from pathlib import Path

import pytest

from benchmarks.soak_rollouts import Ask, Heard, Rollouts
from benchmarks.soak_versions import LATEST, Versions
from proxy.simulator.adapters import write_adapter
from proxy.simulator.weights import expected_tokens

PROMPT = list(range(3, 40))


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    versions = Versions(tmp_path)
    for number in (1, 2):
        write_adapter(tmp_path / f"soak-v{number}", seed=number)
        versions.seen(number)
    return versions


@pytest.fixture
def rollouts(versions: Versions) -> Rollouts:
    return Rollouts("http://unused", versions, {}, [b"secret"], seed=1, leaving=0.0)


def ask(model: str = "soak-v2", floor: int = 2, prompts: int = 1, n: int = 1) -> Ask:
    return Ask(
        model, [[*PROMPT, at] for at in range(prompts)], n, seed=5, tokens=20, stream=True, leave=None, floor=floor
    )


def heard(
    versions: Versions, version: int = 2, count: int = 20, seed: int = 5, says: int | None = None, of: Ask | None = None
) -> Heard:
    weights, _ = versions.remember(version)
    says = says or version
    tokens = {}
    for choice in range((of or ask()).choices):
        prompt, sample = divmod(choice, (of or ask()).n)
        tokens[choice] = expected_tokens(weights, [*PROMPT, prompt], count, seed + sample)
    return Heard(
        status=200,
        replicas=(0, 2),
        digest=versions.remember(says)[1],
        model=f"soak-v{says}",
        tokens=tokens,
        finished=set(tokens) if count == 20 else set(),
    )


def test_right_answers(rollouts: Rollouts, versions: Versions) -> None:
    rollouts._check(ask(), heard(versions))
    rollouts._check(ask(LATEST), heard(versions))
    rollouts._check(ask(), heard(versions, count=7))
    rollouts._check(ask(), Heard(status=200))
    for many in (ask(prompts=3), ask(n=3), ask(prompts=2, n=2)):
        rollouts._check(many, heard(versions, of=many))
    assert rollouts.tally.wrong == []


def test_wrong_answers(rollouts: Rollouts, versions: Versions) -> None:
    short = heard(versions, count=19)
    short.finished = {0}
    unlike = heard(versions)
    unlike.digest = versions.remember(1)[1]
    both = ask(prompts=2)
    swapped = heard(versions, of=both)
    swapped.tokens = {0: swapped.tokens[0], 1: swapped.tokens[0]}
    for case in (
        (both, swapped),
        (ask(), heard(versions, version=1, says=2)),
        (ask(), heard(versions, version=1, count=4, says=2)),
        (ask(), heard(versions, version=1)),
        (ask(LATEST), heard(versions, version=1)),
        (ask(), heard(versions, seed=6)),
        (ask(), short),
        (ask(), unlike),
    ):
        before = len(rollouts.tally.wrong)
        rollouts._check(*case)
        assert len(rollouts.tally.wrong) == before + 1, case


def test_only_a_kill_excuses_a_broken_stream(rollouts: Rollouts, versions: Versions) -> None:
    begun = heard(versions, count=3)
    assert not rollouts._was_cut(begun)
    rollouts._kills[1] = time.monotonic()
    assert not rollouts._was_cut(begun)
    rollouts._kills[0] = time.monotonic() - 60
    assert not rollouts._was_cut(begun)
    rollouts._kills[0] = time.monotonic()
    assert rollouts._was_cut(begun)
    assert not rollouts._was_cut(Heard())


def test_secrets_are_noticed(rollouts: Rollouts) -> None:
    rollouts._look_for_secrets(b"nothing here")
    assert not rollouts.tally.failed
    rollouts._look_for_secrets(b'{"message": "secret"}')
    assert sum(rollouts.tally.failed.values()) == 1


def test_an_answer_is_whole_when_each_of_its_choices_is(rollouts: Rollouts, versions: Versions) -> None:
    both = ask(prompts=2)
    half = heard(versions, of=both)
    half.times.append(0.0)
    half.finished = {0}
    rollouts._answered(both, half, 1.0, 0.0)
    assert rollouts.tally.answered == 0
    assert sum(rollouts.tally.failed.values()) == 1
    half.finished = {0, 1}
    rollouts._answered(both, half, 1.0, 0.0)
    assert (rollouts.tally.answered, rollouts.tally.batches, rollouts.tally.tokens) == (1, 1, 40)
