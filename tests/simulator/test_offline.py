"""The fleet on a virtual clock."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import pytest

from proxy.simulator.engine import EngineConfig
from proxy.simulator.offline import Call, EndlessCache, Flight, OfflineFleet, Tally, TokenIds
from proxy.simulator.weights import BASE, expected_tokens

CONFIG = EngineConfig(capacity_blocks=200, prefill_tps=1000.0, decode_tps=10.0)


def ids(*parts: Iterable[int]) -> TokenIds:
    return TokenIds(array("I", [token for part in parts for token in part]))


PROMPT = ids(range(1000, 1100))


def call(*prompts: TokenIds, out: int = 5, n: int = 1, model: str = "", **more: object) -> Call:
    return Call(model, bool(model), prompts, (out,) * (len(prompts) * n), n, **more)  # type: ignore[arg-type]


def finish(fleet: OfflineFleet) -> list[Flight]:
    over = []
    while (at := fleet.next_event_time()) is not None:
        over += fleet.advance(at)
    return over


def test_one_call_takes_its_prefill_and_its_steps() -> None:
    fleet = OfflineFleet("prefix", CONFIG, 2)
    fleet.send(call(PROMPT), 1.0)
    assert fleet.in_flight == 1
    (flight,) = finish(fleet)
    assert flight.sequences[0].output == expected_tokens(BASE, PROMPT.ids, 5)
    assert (flight.first_token, flight.finished) == pytest.approx((1.1, 1.5))
    assert fleet.in_flight == 0
    assert fleet.tally.shares == [int(index == flight.decision.replica) for index in range(2)]
    assert (fleet.tally.requests, fleet.tally.prompt_tokens, fleet.tally.cached_tokens) == (1, 100, 0)
    assert (fleet.tally.first_token_secs, fleet.tally.wall_secs) == pytest.approx((0.1, 1.5))
    assert fleet.router.counters()["in_flight"] == 0


def test_a_next_turn_finds_prompt_and_answer_in_the_cache() -> None:
    fleet = OfflineFleet("prefix", CONFIG, 3)
    fleet.send(call(PROMPT, out=30), 0.0)
    (first,) = finish(fleet)
    turn = ids(PROMPT.ids, first.sequences[0].output, range(2000, 2050))
    fleet.send(call(turn), first.finished)
    (second,) = finish(fleet)
    assert second.decision.replica == first.decision.replica and second.decision.route == "affinity"
    assert fleet.tally.cached_tokens == fleet.tally.endless == 128
    assert fleet.tally.of_endless == 1.0


def test_round_robin_forgoes_what_an_endless_cache_would_reuse() -> None:
    fleet = OfflineFleet("round_robin", CONFIG, 2)
    for number in range(4):
        fleet.send(call(PROMPT, seed=number), 0.0)
    finish(fleet)
    tally = fleet.tally
    assert tally.shares == [2, 2] and tally.balance == 1.0
    assert (tally.cached_tokens, tally.endless, tally.prompt_tokens) == (2 * 96, 3 * 96, 400)
    assert (tally.reuse, tally.of_endless) == pytest.approx((0.48, 2 / 3))


def test_adapters_and_salts_share_nothing() -> None:
    fleet = OfflineFleet("prefix", CONFIG, 1)
    for each in (call(PROMPT), call(PROMPT, model="p-v1"), call(PROMPT, model="p-v2"), call(PROMPT, salt="s")):
        fleet.send(each, 0.0)
    over = finish(fleet)
    assert fleet.tally.cached_tokens == fleet.tally.endless == 0
    assert len({tuple(flight.sequences[0].output) for flight in over}) == 3  # the salt does not change the weights


def test_a_batch_with_several_answers_each_is_one_request() -> None:
    fleet = OfflineFleet("prefix", CONFIG, 2)
    other = ids(range(3000, 3050))
    fleet.send(call(PROMPT, other, n=2), 0.0)
    assert fleet.in_flight == 4
    (flight,) = finish(fleet)
    assert flight.prompt_tokens == 150 and flight.cached_tokens == 0
    outputs = [sequence.output for sequence in flight.sequences]
    assert outputs[2:] == [expected_tokens(BASE, other.ids, 5, seed) for seed in (2, 3)]
    assert fleet.tally.requests == 1


def test_what_is_larger_than_a_cache_is_refused() -> None:
    fleet = OfflineFleet("prefix", CONFIG, 1)
    large = call(ids(range(3195)), out=6)
    assert large.longest == 3201
    with pytest.raises(ValueError, match="does not fit"):
        fleet.send(large, 0.0)


def test_the_endless_cache_counts_whole_blocks_but_the_last_token() -> None:
    cache = EndlessCache(16)
    asked = call(ids(range(32)))
    assert [cache.ask(asked), cache.ask(asked), cache.ask(call(ids(range(33))))] == [0, 16, 32]
    cache.learn(asked, [*range(32), *range(100, 116)])
    assert cache.ask(call(ids(range(32), range(100, 120)))) == 48


def test_a_run_without_requests_divides_by_nothing() -> None:
    tally = Tally(shares=[0, 0])
    assert (tally.reuse, tally.of_endless, tally.balance) == (0.0, 1.0, 1.0)
