"""The whole of the routing: groups, trees, truth, leases, two proxies."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.routing.policies import POLICIES
from proxy.routing.prompt import Kind, Prompt
from proxy.routing.request import RouteRequest, parse
from proxy.routing.router import Decision, Router
from tests.routing.helpers import ask, at_rest, ids, request, router


def finish(it: Router, decision: Decision, now: float = 1.0, **said: object) -> None:
    it.end(decision, now, ok=True, **said)  # type: ignore[arg-type]


def test_the_members_of_a_group_stay_together() -> None:
    it = router()
    for group in range(20):
        decisions = [ask(it, request(ids(600, group))) for _ in range(8)]
        for decision in decisions:
            finish(it, decision)
        if group:  # the first is spread a little, to learn from it
            assert len({decision.replica for decision in decisions[1:]}) == 1 or group < 3
    assert at_rest(it)


def test_predictions_follow_the_engine_s_own_rule() -> None:
    """Blocks of sixteen, and never the last token of a prompt."""
    it = router()
    tokens = ids(600, 1)
    assert ask(it, request(tokens)).cached_tokens == 0
    assert ask(it, request(tokens)).cached_tokens == 592
    longer = ask(it, request(tokens + ids(200, 2)))
    assert longer.replica is not None and 576 <= longer.cached_tokens <= 608
    exact = ids(160, 3)
    ask(it, request(exact))
    assert ask(it, request(exact)).cached_tokens == 144


def test_answers_are_part_of_the_next_turn_s_prefix() -> None:
    it = router()
    tokens, answer = ids(320, 1), ids(160, 2)
    first = ask(it, request(tokens))
    finish(it, first, output_tokens=160, output_ids=answer)
    second = ask(it, request(tokens + answer + ids(100, 3)))
    assert (second.replica, second.route) == (first.replica, "affinity")
    assert second.cached_tokens >= 448
    raw = ask(it, request(ids(320, 4)))
    finish(it, raw, output_tokens=160, output_ids=b"[" + b", ".join(b"%d" % it for it in answer) + b"]")
    assert ask(it, request(ids(320, 4) + answer + ids(50, 5))).cached_tokens >= 448


def test_siblings_return_to_their_own_branch() -> None:
    it = router(2)
    trunk = ids(600, 1)
    branches = []
    for number in range(8):
        decision = ask(it, request(trunk), candidates=[number % 2])
        answer = ids(160, 10 + number)
        finish(it, decision, output_tokens=160, output_ids=answer)
        branches.append((decision.replica, answer))
    for replica, answer in branches:
        assert ask(it, request(trunk + answer + ids(60, 3)), candidates=[0, 1]).replica == replica


@pytest.mark.parametrize("replicas", [2, 4, 8, 64])
@pytest.mark.parametrize("shared", [48, 2000])
def test_a_preamble_does_not_draw_everybody_to_one_replica(replicas: int, shared: int) -> None:
    it = router(replicas)
    preamble = ids(shared, 0)
    counts: Counter[int] = Counter()
    groups = 5 * replicas
    for group in range(groups):
        members = [ask(it, request(preamble + ids(300, group + 1)), range(replicas)) for _ in range(4)]
        counts.update(decision.replica for decision in members)
        for decision in members:
            finish(it, decision)
    assert max(counts.values()) <= 1.25 * 20


def test_two_proxies_and_a_restarted_one_place_new_prompts_alike() -> None:
    one, other, late = router(4), router(4), router(4)
    same = late_same = 0
    for number in range(200):
        asked = request(ids(48, 0) + ids(300, number + 1))
        replicas = []
        for it in (one, other) if number < 100 else (one, other, late):
            decision = ask(it, asked)
            finish(it, decision)
            replicas.append(decision.replica)
        same += replicas[0] == replicas[1]
        late_same += len(replicas) == 3 and replicas[0] == replicas[2]
    assert same == 200
    assert late_same > 40  # by chance it were 25


@pytest.mark.parametrize("kind", [Kind.TEXT, Kind.CHAT])
def test_text_and_chat_have_affinity_too(kind: Kind) -> None:
    it = router()
    draw = random.Random(5)
    for group in range(10):
        text = bytes(draw.randrange(97, 122) for _ in range(2000))
        turns = [Prompt(kind, text, group), Prompt(kind, text + b"more" * 200, 100 + group)]
        first = ask(it, RouteRequest(prompts=(turns[0],)))
        second = ask(it, RouteRequest(prompts=(turns[1],)))
        assert second.replica == first.replica and second.cached_tokens > 300
        finish(it, first)
        finish(it, second)


def test_models_and_salts_share_nothing() -> None:
    it = router()
    ask(it, request(ids(300, 1)), model="v1")
    assert ask(it, request(ids(300, 1)), model="v2").cached_tokens == 0
    assert ask(it, request(ids(300, 1), salt="s"), model="v1").cached_tokens == 0
    assert ask(it, request(ids(300, 1)), model="v1").cached_tokens > 0
    it.forget_model("v1")
    assert ask(it, request(ids(300, 1)), model="v1").cached_tokens == 0


def test_a_replica_that_restarted_is_predicted_empty() -> None:
    it = router()
    first = ask(it, request(ids(300, 1)))
    it.forget(first.replica)
    assert ask(it, request(ids(300, 1)), candidates=[first.replica]).cached_tokens == 0


def test_a_small_cache_is_known_to_be_small() -> None:
    it = router(1, capacity=4000)
    for number in range(20):
        finish(it, ask(it, request(ids(600, number)), candidates=[0]))
    assert ask(it, request(ids(600, 19)), candidates=[0]).cached_tokens == 592
    assert ask(it, request(ids(600, 3)), candidates=[0]).cached_tokens == 0


def test_a_replica_that_reused_less_is_believed() -> None:
    """It was emptied behind our back: what it was thought to hold from before is forgotten."""
    it = router(1)
    for number in range(30):
        finish(it, ask(it, request(ids(600, number)), candidates=[0]))
    surprised = ask(it, request(ids(600, 15)), candidates=[0])
    finish(it, surprised, cached_tokens=0)
    assert ask(it, request(ids(600, 3)), candidates=[0]).cached_tokens == 0
    assert ask(it, request(ids(600, 25)), candidates=[0]).cached_tokens == 592
    known = it.counters()
    assert (known["predicted_cached_tokens"], known["actual_cached_tokens"], known["corrections"]) == (592, 0, 1)


def test_requests_side_by_side_prove_nothing() -> None:
    it = router(1)
    finish(it, ask(it, request(ids(600, 0)), candidates=[0]))
    members = [ask(it, request(ids(600, 1)), candidates=[0]) for _ in range(4)]
    for decision in members:
        finish(it, decision, cached_tokens=0)
    assert it.counters()["corrections"] == 0


def test_prompt_logprobs_are_not_predicted_to_reuse() -> None:
    it = router()
    ask(it, request(ids(300, 1)))
    again = RouteRequest(prompts=request(ids(300, 1)).prompts, reads_cache=False)
    assert ask(it, again).cached_tokens == 0


def test_a_body_without_a_prompt_goes_where_there_is_least_to_do() -> None:
    it = router()
    busy = ask(it, request(ids(300, 1)))
    decision = ask(it, parse("/v1/completions", b"nonsense"))
    assert decision.route == "fallback" and decision.replica != busy.replica
    finish(it, busy)
    finish(it, decision)
    assert at_rest(it)


def test_batches_count_every_sequence() -> None:
    it = router()
    decision = ask(it, request(*(ids(100, seed) for seed in range(5)), n=3))
    assert decision.sequences == 15 and decision.prompt_tokens == 500
    assert it.counters()["in_flight"] == 15
    finish(it, decision, output_tokens=150)
    assert at_rest(it)


def test_a_dropped_replica_takes_its_load_along() -> None:
    it = router(2)
    decision = ask(it, request(ids(100, 1)), candidates=[0])
    it.drop_replica(0)
    assert it.counters()["in_flight"] == 0
    it.set_replica(2, key="http://new", block_size=16, capacity_tokens=None)
    it.set_replica(0, key="http://10.0.0.0:8000", block_size=16, capacity_tokens=None)
    finish(it, decision)
    assert at_rest(it)
    late = it.decide(request(ids(100, 1)), "m", [2], 0.0)
    it.drop_replica(2)
    it.start(late, 0.0)
    finish(it, late)
    assert at_rest(it)


def test_one_busy_replica_is_left_alone() -> None:
    it = router(2)
    for number in range(40):
        ask(it, request(ids(100, number)), candidates=[0])
    assert {ask(it, request(ids(100, 100 + number)), candidates=[0, 1]).replica for number in range(6)} == {1}


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="no policy is called 'fast'"):
        Router("fast")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_load_at_rest_is_zero_after_100_000_events(policy: str) -> None:
    it = router(5, policy, capacity=20_000)
    draw = random.Random(policy)
    prompts = [request(ids(draw.choice([3, 40, 200]), seed), n=draw.choice([1, 1, 4])) for seed in range(60)]
    prompts.append(parse("/v1/completions", b"{}"))
    running: list[Decision] = []
    now = 0.0
    for _ in range(100_000 // 3):
        now += draw.expovariate(100.0)
        what = draw.random()
        if what < 0.5 or not running:
            candidates = draw.sample(range(5), draw.randint(1, 5))
            running.append(ask(it, draw.choice(prompts), candidates, now, model=draw.choice("ab")))
        elif what < 0.6:
            it.first_byte(draw.choice(running), now)
        elif what < 0.61:
            it.forget(draw.randrange(5))
        else:
            decision = running.pop(draw.randrange(len(running)))
            tokens = draw.choice([None, 5, 50])
            it.end(
                decision, now, ok=draw.random() < 0.9, output_tokens=tokens, cached_tokens=draw.choice([None, 0, 48])
            )
    for decision in running:
        it.end(decision, now, ok=False)
    assert at_rest(it)
    assert all(it._index.tokens(slot) <= 20_000 for slot in range(5))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=30), st.randoms(use_true_random=False))
def test_decisions_are_among_the_candidates_and_predictions_within_the_prompt(
    asked: list[tuple[int, int]], draw: random.Random
) -> None:
    it = router(6, capacity=5000)
    for seed, pieces in asked:
        tokens = [token for piece in range(pieces) for token in ids(60, seed * 10 + piece)]
        candidates = draw.sample(range(6), draw.randint(1, 6))
        decision = ask(it, request(tokens), candidates)
        assert decision.replica in candidates
        assert 0 <= decision.cached_tokens < decision.prompt_tokens == len(tokens)
