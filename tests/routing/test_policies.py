"""Each policy against a hand-made view."""

from dataclasses import replace as with_rates
from typing import Any

from msgspec.structs import replace

from proxy.routing.affinity import NOTHING, Found
from proxy.routing.ledger import Ledger
from proxy.routing.load import Rates, ReplicaLoad
from proxy.routing.policies import (
    POPULAR,
    View,
    consistent_hash,
    least_loaded,
    prefix,
    round_robin,
)
from proxy.routing.ring import Ring

SLOTS = [0, 1, 2, 3]
GPU = Rates(prefill=5e-5, step=0.016, crowd=0.0002, answers=100, seconds=1.0)
CPU = Rates(prefill=3e-4, step=0.007, crowd=0.027, answers=100, seconds=4.0)


def view(sequences: list[int] | None = None, **changes: Any) -> View:
    counts = sequences or [0, 0, 0, 0]
    ledger = Ledger()
    for slot in SLOTS:
        ledger.open(slot, ())
    plain = View(
        candidates=SLOTS,
        allowed=0b1111,
        loads=[ReplicaLoad(sequences=count, usual=float(count)) for count in counts],
        busy=[float(count) for count in counts],
        in_flight=sum(counts),
        ledger=ledger,
        ring=Ring({slot: f"http://r{slot}" for slot in SLOTS}),
        rates=Rates(),
        now=0.0,
        found=NOTHING,
        key=12345,
        prompt_tokens=600,
        tokens_out=48.0,
        sequences=1,
        turn=0,
    )
    return replace(plain, **changes)


def held(*slots: int, asked: int = 4, tokens: float = 592.0) -> Found:
    return Found(slots, tokens, asked)


def test_a_continuation_goes_where_it_is() -> None:
    assert prefix(view([1, 1, 1, 1], found=held(2))) == (2, "affinity")


def test_of_several_holders_the_least_busy() -> None:
    assert prefix(view([3, 1, 2, 2], found=held(0, 1))) == (1, "affinity")


def test_load_alone_is_no_reason_while_nothing_was_learned() -> None:
    assert prefix(view([30, 0, 2, 2], found=held(0))) == (0, "affinity")


def test_where_a_batch_slows_its_replica_the_second_sibling_goes_to_an_idle_one() -> None:
    assert prefix(view([1, 0, 0, 0], found=held(0), rates=CPU))[1] == "spill"


def test_where_a_batch_does_not_slow_its_replica_the_group_stays() -> None:
    alone = view([7, 0, 0, 0], found=held(0), rates=GPU)
    for load in alone.loads:
        load.usual = 2.0
    assert prefix(alone) == (0, "affinity")
    assert prefix(view([10, 6, 6, 6], found=held(0), rates=GPU)) == (0, "affinity")


def test_no_copy_for_a_replica_that_is_busy_too() -> None:
    """From some sequences on, a batch completes no more than a smaller one: nothing is gained by moving."""
    assert prefix(view([14, 6, 6, 6], found=held(0), rates=CPU)) == (0, "affinity")


def test_what_is_idle_for_a_moment_only_is_no_reason() -> None:
    moment = view([24, 0], found=held(0), rates=CPU, candidates=[0, 1], allowed=0b11)
    assert prefix(moment)[1] == "spill"
    moment.loads[1].usual = 16.0
    assert prefix(moment) == (0, "affinity")


def test_a_new_prompt_goes_to_an_idle_replica_only_if_that_is_worth_much() -> None:
    favourite = next(view().ring.walk(12345))
    counts = [0 if slot == (favourite + 1) % 4 else 6 for slot in SLOTS]
    assert prefix(view(counts, rates=GPU))[0] == favourite
    assert prefix(view(counts, rates=CPU))[0] == (favourite + 1) % 4


def test_a_long_queue_of_prompts_is_a_reason() -> None:
    waiting = view([10, 6, 6, 6], found=held(0), rates=GPU)
    waiting.loads[0].uncached, waiting.loads[0].queued = 200_000, 200_000
    assert prefix(waiting)[1] == "spill"


def test_a_popular_prompt_gets_another_copy() -> None:
    busy = view([8, 1, 1, 1], found=held(0, asked=POPULAR), rates=GPU)
    assert prefix(busy)[1] == "spill"


def test_new_prompts_follow_the_ring_until_a_replica_had_its_part() -> None:
    empty = view()
    favourite = next(empty.ring.walk(empty.key))
    assert prefix(empty) == (favourite, "new")
    empty.ledger.count(favourite, 1.0, 4)
    assert prefix(empty)[0] == list(empty.ring.walk(empty.key))[1]


def test_no_new_prompt_goes_where_far_too_much_is_in_flight() -> None:
    favourite = next(view().ring.walk(12345))
    counts = [60 if slot == favourite else 4 for slot in SLOTS]
    assert prefix(view(counts))[0] != favourite


def test_new_prompts_are_even_over_any_stretch() -> None:
    some = view()
    counts = [0] * 4
    for number in range(400):
        slot = prefix(replace(some, key=hash((number, "x")) & (2**64 - 1)))[0]
        some.ledger.count(slot, 1.0, 4)
        counts[slot] += 1
    assert max(counts) <= 1.1 * 100


def test_consistent_hash_is_bounded_by_load() -> None:
    favourite = next(view().ring.walk(12345))
    assert consistent_hash(view()) == (favourite, "new")
    counts = [9 if slot == favourite else 1 for slot in SLOTS]
    assert consistent_hash(view(counts))[0] != favourite


def test_least_loaded() -> None:
    assert least_loaded(view([2, 1, 0, 3])) == (2, "new")


def test_round_robin() -> None:
    assert [round_robin(view(turn=turn))[0] for turn in range(5)] == [0, 1, 2, 3, 0]
    assert round_robin(view(turn=1, candidates=[1, 3]))[0] == 3


def others(view: View) -> View:
    for _ in range(20):
        view.ledger.answered(surprise=True)
    return view


def test_beside_other_proxies_a_copy_must_be_worth_more() -> None:
    alone = view([12, 1, 2, 2], found=held(0), rates=with_rates(GPU, prefill=1e-5))
    assert prefix(alone)[1] == "spill"
    assert prefix(others(alone)) == (0, "affinity")
    slowed = view([2, 0, 0, 0], found=held(0), rates=CPU)
    assert prefix(slowed)[1] == "spill"
    assert prefix(others(slowed))[1] == "spill"  # time is lost at once: no reason to agree


def test_beside_other_proxies_the_home_depends_less_on_what_this_one_saw() -> None:
    alone = view(rates=GPU)
    favourite = next(alone.ring.walk(alone.key))
    for slot in SLOTS:
        alone.ledger.count(slot, 1.5 if slot == favourite else 1.0, 4)
    assert prefix(alone)[0] != favourite
    assert prefix(others(alone))[0] == favourite
