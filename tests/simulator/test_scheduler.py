"""Who runs, on which blocks; driven through the engine, whose clock it needs."""

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.simulator.engine import Engine, EngineConfig
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef
from proxy.simulator.weights import BASE, expected_tokens, mixed_weights

PROMPT = list(range(100, 200))


class Table:
    """Weights by adapter id, changeable under a running engine."""

    def __init__(self, **weights: str) -> None:
        self.weights = weights

    def activate(self, lora: LoraRef, fresh: bool) -> str:
        return self.weights[f"id{lora.int_id}"]


def run(engine: Engine, *requests: EngineRequest) -> list[Sequence]:
    """Submit all now, run to rest."""
    sequences = [engine.submit(request, engine.now) for request in requests]
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    return sequences


def ask(engine: Engine, prompt: list[int], max_tokens: int = 1, **more: object) -> Sequence:
    return run(engine, EngineRequest("r", prompt, max_tokens, **more))[0]  # type: ignore[arg-type]


def test_full_blocks_but_never_the_last_token() -> None:
    engine = Engine(EngineConfig())
    assert [ask(engine, PROMPT).cached_tokens for _ in range(2)] == [0, 96]
    assert [ask(engine, PROMPT[:64] + [1] * 32).cached_tokens for _ in range(2)] == [64, 80]
    assert ask(engine, PROMPT[:15]).cached_tokens == 0
    counters = engine.counters
    assert (counters.queries, counters.hits, counters.misses) == (407, 240, 167)
    assert counters.prefilled == 167


def test_equal_prompts_that_arrive_together_share() -> None:
    engine = Engine(EngineConfig(prefill_tps=1000, decode_tps=100))
    group = run(engine, *(EngineRequest(str(seed), PROMPT, 5, seed=seed) for seed in range(8)))
    assert [sequence.cached_tokens for sequence in group] == [0] + [96] * 7
    assert engine.counters.prefilled == 100 + 7 * 4
    assert len({tuple(sequence.output) for sequence in group}) == 8


def test_generated_blocks_are_hit_by_the_next_turn() -> None:
    engine = Engine(EngineConfig())
    output = ask(engine, PROMPT[:32], 33).output
    # 64 of the 65 tokens have KV.
    assert ask(engine, PROMPT[:32] + output + [7]).cached_tokens == 64


def test_names_and_salts_part_the_cache_and_weights_do_not() -> None:
    engine = Engine(EngineConfig(), Table(id1="A", id2="B"))
    assert ask(engine, PROMPT).cached_tokens == 0
    assert ask(engine, PROMPT, lora=LoraRef("v1", 1, "")).cached_tokens == 0
    assert ask(engine, PROMPT, cache_salt="s").cached_tokens == 0
    assert ask(engine, PROMPT, lora=LoraRef("v1", 1, ""), cache_salt="s").cached_tokens == 0
    assert ask(engine, PROMPT, lora=LoraRef("v1", 2, "")).cached_tokens == 96


def test_a_name_used_for_other_weights_answers_from_the_old_kv() -> None:
    engine = Engine(EngineConfig(), Table(id1="A", id2="B"))
    old, new, other = LoraRef("v1", 1, ""), LoraRef("v1", 2, ""), LoraRef("v2", 2, "")
    assert ask(engine, PROMPT, 8, lora=old).output == expected_tokens("A", PROMPT, 8)
    stale = ask(engine, PROMPT, 8, lora=new)
    assert stale.output == expected_tokens(mixed_weights("B", "A"), PROMPT, 8)
    assert ask(engine, PROMPT, 8, lora=other).output == expected_tokens("B", PROMPT, 8)
    # What was computed on top of stale blocks stays stale.
    longer = PROMPT + stale.output
    assert ask(engine, [*longer, 1], 8, lora=new).output == expected_tokens(mixed_weights("B", "A"), [*longer, 1], 8)
    assert engine.reset_prefix_cache(engine.now)
    assert ask(engine, PROMPT, 8, lora=new).output == expected_tokens("B", PROMPT, 8)


def test_the_least_recently_used_prompt_is_evicted() -> None:
    engine = Engine(EngineConfig(capacity_blocks=8))
    one, two, three = ([start] * 48 for start in (1, 2, 3))
    for prompt in (one, two, one, three):
        ask(engine, prompt)
    assert ask(engine, one).cached_tokens == 32
    # Tail first: its last two blocks are gone.
    assert ask(engine, two).cached_tokens == 16


def test_seats_are_limited_and_served_in_order() -> None:
    engine = Engine(EngineConfig(max_num_seqs=2, decode_tps=10))
    sequences = [engine.submit(EngineRequest(str(i), [i] * 20, 5), 0.0) for i in range(1, 5)]
    engine.advance(0.0)
    assert (len(engine.running), len(engine.waiting)) == (2, 2)
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    starts = [sequence.started or 0.0 for sequence in sequences]
    assert starts == sorted(starts) and starts[1] < starts[2]


def test_long_prompts_are_prefilled_in_chunks() -> None:
    engine = Engine(EngineConfig(max_batched_tokens=64, prefill_tps=64, decode_tps=1000))
    long = engine.submit(EngineRequest("long", list(range(200)), 1), 0.0)
    short = engine.submit(EngineRequest("short", [1] * 10, 1), 0.0)
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    # Three full chunks; the short prompt fits beside the last 8 tokens.
    assert long.finished == short.finished == 3 + 18 / 64


def test_too_many_adapters_at_once_wait_and_others_pass_them() -> None:
    engine = Engine(EngineConfig(max_loras=1, decode_tps=10), Table(id1="A", id2="B"))
    first = engine.submit(EngineRequest("a", [1] * 20, 5, LoraRef("v1", 1, "")), 0.0)
    second = engine.submit(EngineRequest("b", [2] * 20, 5, LoraRef("v2", 2, "")), 0.0)
    third = engine.submit(EngineRequest("c", [3] * 20, 5), 0.0)
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    assert first.started == third.started == 0.0
    assert (second.started or 0) >= (first.finished or 0) > 0


def test_blocks_that_run_out_preempt_the_youngest() -> None:
    engine = Engine(EngineConfig(capacity_blocks=6, decode_tps=10, prefill_tps=1e6))
    old = engine.submit(EngineRequest("old", [1] * 30, 40), 0.0)
    young = engine.submit(EngineRequest("young", [2] * 30, 40), 0.0)
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    assert (old.preemptions, young.preemptions > 0) == (0, True)
    assert young.output == expected_tokens(BASE, [2] * 30, 40)
    assert (old.finished or 0) < (young.finished or 0)


def test_weights_that_change_under_a_running_request_show() -> None:
    table = Table(id1="A")
    engine = Engine(EngineConfig(decode_tps=10), table)
    sequence = engine.submit(EngineRequest("r", PROMPT, 20, LoraRef("v1", 1, "")), 0.0)
    engine.advance(0.55)
    table.weights["id1"] = "B"
    # Equal steps are planned in one go, so the change shows when the batch changes.
    engine.submit(EngineRequest("other", [5] * 20, 1), 0.55)
    while (when := engine.next_event_time()) is not None:
        engine.advance(when)
    assert sequence.output[:7] == expected_tokens("A", PROMPT, 7)
    assert sequence.output[7:] == expected_tokens(mixed_weights("B", "A"), PROMPT, 20)[7:]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 70), st.integers(1, 40), st.floats(0, 2), st.booleans()),
        min_size=1,
        max_size=25,
    ),
    st.integers(8, 30),
    st.integers(1, 5),
)
def test_everybody_gets_the_right_tokens_and_nothing_leaks(
    plan: list[tuple[int, int, int, float, bool]], capacity: int, seats: int
) -> None:
    """Random arrivals, prefixes, aborts and pauses on a pool that is nearly too small."""
    config = EngineConfig(
        capacity_blocks=capacity, max_num_seqs=seats, prefill_tps=500, decode_tps=50, max_batched_tokens=48
    )
    engine = Engine(config)
    sequences, now = [], 0.0
    for number, (kind, length, tokens, gap, abort) in enumerate(plan):
        now += gap
        prompt = ([kind] * 40 + list(range(100)))[:length]
        sequences.append(engine.submit(EngineRequest(str(number), prompt, tokens), now))
        if abort:
            engine.abort([str(number // 2)], now)
        if number % 7 == 3:
            engine.pause("keep", number % 2 == 0, now)
            now += 0.1
            engine.resume(now)
    reported = set(engine.advance(now))
    while (when := engine.next_event_time()) is not None:
        assert when >= now
        now = when
        reported |= set(engine.advance(now))
    assert all(sequence.finish_reason for sequence in sequences)
    assert {sequence for sequence in sequences if sequence.finish_reason == "length"} <= reported
    for sequence in sequences:
        assert sequence.output == expected_tokens(BASE, list(sequence.request.prompt), sequence.produced)
    assert (engine.pool.used, engine.running, list(engine.waiting)) == (0, [], [])
    assert engine.counters.generated == sum(sequence.produced for sequence in sequences)
