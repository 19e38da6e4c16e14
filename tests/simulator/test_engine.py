"""The clock, and what the engine promises its owner; see test_scheduler for batches and blocks."""

from math import inf

import pytest

from proxy.simulator.engine import Engine, EngineConfig, EngineDead
from proxy.simulator.sequence import EngineRequest, Sequence
from proxy.simulator.slots import LoraRef
from proxy.simulator.weights import BASE, expected_tokens

PROMPT = list(range(100, 200))


def request(name: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 10, **more: object) -> EngineRequest:
    return EngineRequest(name, prompt, max_tokens, **more)  # type: ignore[arg-type]


def drain(engine: Engine, limit: float = inf) -> list[Sequence]:
    """Run to rest, event by event; what was reported."""
    reported = []
    while (when := engine.next_event_time()) is not None and when <= limit:
        reported += engine.advance(when)
    return reported


def test_infinite_speed_answers_at_once() -> None:
    engine = Engine(EngineConfig())
    sequence = engine.submit(request(), 5.0)
    assert engine.next_event_time() == 5.0
    assert engine.advance(5.0) == [sequence]
    assert (sequence.finish_reason, sequence.finished, sequence.output) == (
        "length",
        5.0,
        expected_tokens(BASE, PROMPT, 10),
    )
    assert engine.next_event_time() is None


def test_step_times() -> None:
    """100 tokens at 1000/s, of which the prompt's end gives the first; then 9 more at 10/s."""
    engine = Engine(EngineConfig(prefill_tps=1000, decode_tps=10))
    sequence = engine.submit(request(), 0.0)
    drain(engine)
    assert sequence.first_token == pytest.approx(0.1)
    assert sequence.finished == pytest.approx(0.1 + 0.9)


def test_speed_divides_and_slowdown_adds() -> None:
    config = EngineConfig(decode_tps=10, decode_slowdown=0.8, speed=2)
    engine = Engine(config)
    pair = [engine.submit(request(name, [*PROMPT[:20], index], 11), 0.0) for index, name in enumerate("ab")]
    drain(engine)
    # Ten steps of (1 + 0.8) / 10 s, twice as fast.
    assert [sequence.finished for sequence in pair] == [pytest.approx(0.9)] * 2


def test_arrivals_wait_for_the_end_of_a_step() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    first = engine.submit(request("a", max_tokens=5), 0.0)
    engine.advance(0.0)
    second = engine.submit(request("b", PROMPT[:30], max_tokens=1), 0.15)
    drain(engine)
    # Steps of 0.1 s: b's prompt goes with the third, whose decode token ends at 0.3.
    assert second.started == pytest.approx(0.2)
    assert second.finished == pytest.approx(0.3)
    assert first.finished == pytest.approx(0.4)


def test_equal_steps_are_one_event_unless_watched() -> None:
    def events(watch: bool) -> int:
        engine = Engine(EngineConfig(decode_tps=10))
        engine.submit(request(max_tokens=50, watch=watch), 0.0)
        count = 0
        while (when := engine.next_event_time()) is not None:
            engine.advance(when)
            count += 1
        return count

    assert (events(False), events(True)) == (2, 50)


def test_looking_in_between_changes_nothing() -> None:
    ends = []
    for looks in ([], [0.33, 0.34, 1.01]):
        engine = Engine(EngineConfig(prefill_tps=1000, decode_tps=10))
        sequence = engine.submit(request(max_tokens=20), 0.0)
        for when in looks:
            engine.advance(when)
        drain(engine)
        ends.append(sequence.finished)
    assert ends[0] == ends[1]


def test_progress_is_visible_at_any_time() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request(max_tokens=20), 0.0)
    engine.advance(0.55)
    assert sequence.output == expected_tokens(BASE, PROMPT, 6)


def test_abort() -> None:
    engine = Engine(EngineConfig(decode_tps=10, max_num_seqs=1))
    running, waiting = engine.submit(request("a"), 0.0), engine.submit(request("b"), 0.0)
    engine.advance(0.25)
    assert engine.abort(["a", "b", "c"], 0.25) == 2
    assert engine.advance(0.25) == [running, waiting]
    assert (running.finish_reason, running.produced, waiting.produced) == ("abort", 3, 0)
    assert (engine.pool.used, engine.next_event_time()) == (0, None)


def test_pause_keep_freezes_and_empties() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request(max_tokens=10), 0.0)
    engine.advance(0.35)
    assert engine.pause("keep", True, 0.35)
    assert (engine.next_event_time(), engine.pool.used, engine.pool.cached) == (None, 0, 0)
    late = engine.submit(request("late", PROMPT[:20], 1), 1.0)
    assert engine.advance(5.0) == []
    assert (sequence.produced, late.started) == (4, None)
    engine.resume(5.0)
    drain(engine)
    assert sequence.output == expected_tokens(BASE, PROMPT, 10)
    assert sequence.preemptions == 1 and engine.counters.prefilled == 100 + 104 + 4


def test_pause_without_clearing_keeps_the_kv() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request(max_tokens=10), 0.0)
    engine.advance(0.35)
    engine.pause("keep", False, 0.35)
    assert engine.pool.used == 7
    assert not engine.reset_prefix_cache(0.4)
    engine.resume(2.0)
    drain(engine)
    assert (sequence.preemptions, engine.counters.prefilled) == (0, 100)


def test_pause_wait_is_complete_when_drained() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    running = engine.submit(request("a", max_tokens=5), 0.0)
    engine.advance(0.05)
    assert not engine.pause("wait", True, 0.05)
    late = engine.submit(request("b", PROMPT[:20], 1), 0.1)
    drain(engine)
    assert (running.finish_reason, late.finish_reason, engine.drained) == ("length", None, True)
    engine.advance(9.0)
    assert engine.pool.cached == 0
    engine.resume(9.0)
    drain(engine)
    assert late.finish_reason == "length"


def test_pause_abort_ends_everything() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request(), 0.0)
    engine.advance(0.1)
    assert engine.pause("abort", True, 0.1)
    assert (sequence.finish_reason, engine.pool.cached) == ("abort", 0)
    with pytest.raises(ValueError, match="bogus"):
        engine.pause("bogus", True, 0.1)


def test_a_frozen_engine_reports_its_last_load() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    engine.submit(request(), 0.0)
    engine.advance(0.1)
    engine.pause("keep", True, 0.1)
    engine.submit(request("b"), 0.2)
    assert (engine.load, len(engine.waiting)) == ((1, 0), 2)
    engine.resume(0.3)
    engine.advance(0.3)
    assert engine.load == (2, 0)


def test_reset_of_running_requests_costs_a_second_prefill() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request(max_tokens=20), 0.0)
    engine.advance(0.55)
    assert not engine.reset_prefix_cache(0.55)
    assert engine.reset_prefix_cache(0.55, running_too=True)
    drain(engine)
    assert sequence.output == expected_tokens(BASE, PROMPT, 20)
    assert engine.counters.prefilled == 100 + 106


def test_what_never_fits_is_refused() -> None:
    engine = Engine(EngineConfig(capacity_blocks=4))
    for impossible in (request(), request(prompt=[]), request(prompt=[1], max_tokens=0)):
        with pytest.raises(ValueError, match="does not fit"):
            engine.submit(impossible, 0.0)


def test_an_adapter_that_cannot_be_read_kills_the_engine() -> None:
    class Gone:
        def activate(self, lora: LoraRef, fresh: bool) -> str:
            raise FileNotFoundError(lora.path)

    engine = Engine(EngineConfig(), Gone())
    engine.submit(request(lora=LoraRef("v1", 1, "/gone")), 0.0)
    with pytest.raises(EngineDead, match="/gone"):
        engine.advance(0.0)


def test_find() -> None:
    engine = Engine(EngineConfig(decode_tps=10))
    sequence = engine.submit(request("a"), 0.0)
    assert engine.find("a") is sequence
    drain(engine)
    assert engine.find("a") is None
