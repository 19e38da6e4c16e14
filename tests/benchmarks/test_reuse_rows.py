from collections import Counter

import pytest

from benchmarks.offline_workloads import Rollout, Turn, Workload
from benchmarks.reuse_rows import GROUP, GROUPS, ROOMY, pays, published, rows, working_set


@pytest.mark.parametrize("replicas", [2, 4])
def test_rows_are_the_same_every_time(replicas: int) -> None:
    assert rows(replicas) == rows(replicas)


def test_rows_about_time_are_the_same_every_time() -> None:
    assert pays() == pays()


@pytest.mark.parametrize("replicas", sorted(GROUPS))
def test_every_group_has_all_its_members(replicas: int) -> None:
    for row in rows(replicas):
        prompts = Counter((each.model, tuple(each.turns[0].tokens)) for each in row.workload.rollouts)
        assert set(prompts.values()) == {GROUP}, row.name
        assert len(prompts) >= replicas, "somebody would have nothing to do"
        assert row.replicas == replicas


def test_prompts_of_a_workload_share_what_they_should() -> None:
    found = {row.name: row.workload.rollouts for row in rows(4)}
    first, *others = {tuple(each.turns[0].tokens) for each in found["2,000-token preamble"]}
    assert all(other[:2000] == first[:2000] and other[2000:] != first[2000:] for other in others)
    assert {len(each.turns) for each in found["four-turn trees"]} == {4}
    assert found["interleaved groups"][:GROUP] != found["interleaved groups"][GROUP : 2 * GROUP]
    assert len({tuple(each.turns[0].tokens) for each in found["interleaved groups"][:GROUP]}) > 1


def test_caches_hold_a_tenth_of_what_is_filled() -> None:
    row = next(row for row in rows(4) if row.name == "caches a tenth")
    assert row.capacity * row.replicas == pytest.approx(working_set(row.workload) / 10, rel=0.01)
    assert [each.capacity for each in rows(4) if each is not row and each.name != row.name] == [ROOMY] * 5


def test_working_set_counts_shared_blocks_once() -> None:
    prompt = list(range(64))
    twins = Workload("twins", [Rollout("base", (Turn(prompt, 9),)), Rollout("base", (Turn(prompt, 9),))])
    assert working_set(twins, answer=32) == 4 + 2 * 2
    other = Workload("two models", [Rollout("a", (Turn(prompt, 9),)), Rollout("b", (Turn(prompt, 9),))])
    assert working_set(other, answer=32) == 2 * 4 + 2 * 2


def test_a_version_appears_every_so_many_requests_and_the_one_before_goes_on() -> None:
    rollouts = published(96, every=200).rollouts
    first: dict[str, int] = {}
    for at, each in enumerate(rollouts):
        first.setdefault(each.model, at)
    assert list(first) == ["policy-v1", "policy-v2", "policy-v3", "policy-v4"]
    for version, at in enumerate(first.values()):
        assert version * 200 <= at < version * 200 + 40
    late = [at for at, each in enumerate(rollouts) if each.model == "policy-v1" and at >= 240]
    assert late and max(late) < 400
