import asyncio

import pytest

from proxy.simulator.engine import Engine, EngineConfig, EngineDead
from proxy.simulator.live import LiveEngine
from proxy.simulator.sequence import EngineRequest

PROMPT = list(range(100, 140))


def live(**config: float) -> LiveEngine:
    return LiveEngine(Engine(EngineConfig(**config)))  # type: ignore[arg-type]


async def test_requests_of_one_turn_share_a_step() -> None:
    engine = live()
    sequences = [engine.submit(EngineRequest(str(i), PROMPT, 4, seed=i)) for i in range(4)]
    await asyncio.gather(*(engine.progress(sequence) for sequence in sequences))
    assert [sequence.cached_tokens for sequence in sequences] == [0, 32, 32, 32]
    assert len({sequence.finished for sequence in sequences}) == 1


async def test_watched_tokens_come_one_by_one() -> None:
    engine = live(decode_tps=200)
    sequence = engine.submit(EngineRequest("r", PROMPT, 5, watch=True))
    seen = []
    while sequence.finish_reason is None:
        await engine.progress(sequence)
        seen.append(sequence.produced)
    assert seen == sorted(seen) and seen[-1] == 5
    assert sequence.finished is not None and sequence.finished - sequence.arrived >= 4 / 200 - 1e-6
    await engine.progress(sequence)


async def test_leaving_aborts() -> None:
    engine = live(decode_tps=10)
    sequence = engine.submit(EngineRequest("r", PROMPT, 50))
    await asyncio.sleep(0)
    engine.leave(sequence)
    assert (sequence.finish_reason, engine.engine.running) == ("abort", [])


async def test_pause_wait_returns_when_drained() -> None:
    engine = live(decode_tps=200)
    sequence = engine.submit(EngineRequest("r", PROMPT, 5))
    await asyncio.sleep(0)
    await engine.pause("wait", True)
    assert sequence.finish_reason == "length"
    await engine.pause("wait", True)


async def test_death_wakes_everybody() -> None:
    engine, deaths = live(decode_tps=10), []
    engine.on_death = lambda: deaths.append(1)
    sequence = engine.submit(EngineRequest("r", PROMPT, 50))
    waiting = asyncio.create_task(engine.progress(sequence))
    await asyncio.sleep(0)
    engine.die(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await waiting
    with pytest.raises(EngineDead):
        engine.submit(EngineRequest("r", PROMPT, 50))
    assert deaths == [1]


async def test_stop_leaves_no_timer() -> None:
    engine = live(decode_tps=10)
    sequence = engine.submit(EngineRequest("r", PROMPT, 50))
    waiting = asyncio.create_task(engine.progress(sequence))
    await asyncio.sleep(0)
    engine.stop()
    with pytest.raises(asyncio.CancelledError):
        await waiting
