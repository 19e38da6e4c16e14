"""Each policy against a hand-made view."""

from typing import Any

from proxy.routing.affinity import NOTHING, Found
from proxy.routing.ledger import Ledger
from proxy.routing.load import Rates, ReplicaLoad
from proxy.routing.policies import (
    COLD,
    POPULAR,
    View,
    consistent_hash,
    least_loaded,
    prefix,
    round_robin,
)
from proxy.routing.ring import Ring

SLOTS = [0, 1, 2, 3]
GPU = Rates(prefill=5e-5, step=0.016, crowd=0.0002, answers=100)
CPU = Rates(prefill=3e-4, step=0.007, crowd=0.027, answers=100)


def view(sequences: list[int] | None = None, **changes: Any) -> View:
    counts = sequences or [0, 0, 0, 0]
    ledger = Ledger()
    for slot in SLOTS:
        ledger.open(slot, ())
    plain = View(
        candidates=SLOTS,
        allowed=0b1111,
        loads=[ReplicaLoad(sequences=count, most=float(count)) for count in counts],
        busy=[float(count) for count in counts],
        in_flight=sum(counts),
        ledger=ledger,
        ring=Ring({slot: f"http://r{slot}" for slot in SLOTS}),
        rates=Rates(),
        now=0.0,
        found=NOTHING,
        key=12345,
        kin={},
        prompt_tokens=600,
        tokens_out=48.0,
        sequences=1,
        turn=0,
        cold=COLD,
    )
    return plain._replace(**changes)


def held(*slots: int, asked: int = 4, tokens: float = 592.0) -> Found:
    return Found(slots, tokens, asked)


def test_a_continuation_goes_where_it_is() -> None:
    assert prefix(view([1, 1, 1, 1], found=held(2))) == (2, "affinity")


def test_of_several_holders_the_least_busy() -> None:
    assert prefix(view([3, 1, 2, 2], found=held(0, 1))) == (1, "affinity")


def test_load_alone_is_no_reason_while_nothing_was_learned() -> None:
    assert prefix(view([30, 2, 2, 2], found=held(0))) == (0, "affinity")


def test_two_spills_are_tried_before_anything_was_learned() -> None:
    first = view([8, 0, 0, 0], found=held(0))
    assert prefix(first).route == "spill"
    assert prefix(first._replace(cold=0)) == (0, "affinity")


def test_a_batch_that_slows_its_replica_is_spread() -> None:
    assert prefix(view([8, 0, 0, 0], found=held(0), rates=CPU, cold=0)).route == "spill"


def test_a_batch_that_does_not_slow_its_replica_stays() -> None:
    assert prefix(view([10, 6, 6, 6], found=held(0), rates=GPU, cold=0)) == (0, "affinity")


def test_what_was_so_for_a_moment_only_is_no_reason() -> None:
    moment = view([14, 0, 0, 0], found=held(0), rates=CPU, cold=0)
    assert prefix(moment).route == "spill"
    for load in moment.loads:
        load.most = 9.0
    assert prefix(moment) == (0, "affinity")


def test_a_long_queue_of_prompts_is_a_reason() -> None:
    waiting = view([10, 6, 6, 6], found=held(0), rates=GPU, cold=0)
    waiting.loads[0].uncached, waiting.loads[0].queued = 200_000, 200_000
    assert prefix(waiting).route == "spill"


def test_a_popular_prompt_gets_another_copy() -> None:
    busy = view([8, 1, 1, 1], found=held(0, asked=POPULAR), rates=GPU, cold=0)
    assert prefix(busy).route == "spill"


def test_new_prompts_follow_the_ring_until_a_replica_had_its_part() -> None:
    empty = view()
    favourite = next(empty.ring.walk(empty.key))
    assert prefix(empty) == (favourite, "new")
    empty.ledger.count(favourite, 1.0, 4)
    assert prefix(empty).slot == list(empty.ring.walk(empty.key))[1]


def test_no_new_prompt_goes_where_far_too_much_is_in_flight() -> None:
    favourite = next(view().ring.walk(12345))
    counts = [60 if slot == favourite else 4 for slot in SLOTS]
    assert prefix(view(counts)).slot != favourite


def test_new_prompts_are_even_over_any_stretch() -> None:
    some = view()
    counts = [0] * 4
    for number in range(400):
        slot = prefix(some._replace(key=hash((number, "x")) & (2**64 - 1))).slot
        some.ledger.count(slot, 1.0, 4)
        counts[slot] += 1
    assert max(counts) <= 1.1 * 100


def test_consistent_hash_is_bounded_by_load() -> None:
    favourite = next(view().ring.walk(12345))
    assert consistent_hash(view()) == (favourite, "new")
    counts = [9 if slot == favourite else 1 for slot in SLOTS]
    assert consistent_hash(view(counts)).slot != favourite


def test_least_loaded() -> None:
    assert least_loaded(view([2, 1, 0, 3])) == (2, "new")


def test_round_robin() -> None:
    assert [round_robin(view(turn=turn)).slot for turn in range(5)] == [0, 1, 2, 3, 0]
    assert round_robin(view(turn=1, candidates=[1, 3])).slot == 3


def test_groups_that_fit_a_replica_are_not_copied_because_they_met_there() -> None:
    """The cost of the moment is no reason; that the group alone is too much for one replica is."""
    met = view([12, 5, 6, 8], found=held(0), rates=CPU, cold=0, kin={0: 4})
    for load in met.loads:
        load.most = 7.8
    assert prefix(met) == (0, "affinity")
    assert prefix(met._replace(kin={0: 11})).route == "spill"
