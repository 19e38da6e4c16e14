"""Recorded traffic on simulated replicas: who waits for whom, and whether it comes out as it was recorded."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from proxy.errors import ConfigError
from proxy.receipt_line import Lines, decode
from proxy.replay import Hardware, replay
from proxy.replay_trace import Recorded, Trace, read
from proxy.routing.policies import POLICIES
from proxy.simulator.embed import SimFleet
from proxy.simulator.offline import Call, Tally, TokenIds
from tests.receipt_samples import DataPath
from tests.web.running import running

HARDWARE = Hardware(replicas=2, capacity_tokens=16_000, prefill_tps=1000.0, decode_tps=10.0, decode_slowdown=0.0)
RECEIPT = decode(Lines().line(0.0, DataPath().outcome([1, 2, 3])))


def trace(*calls: tuple[float, int | None, float]) -> Trace:
    """Calls of 100 prompt and 5 output tokens (0.5 s after its prompt): when, after which, and how long after."""
    prompts = [TokenIds(array("I", range(number * 1000, number * 1000 + 100))) for number in range(len(calls))]
    return Trace(
        [
            Recorded(Call("", False, (prompts[number],), (5,)), at, RECEIPT, after, pause)
            for number, (at, after, pause) in enumerate(calls)
        ]
    )


def test_requests_come_when_they_came() -> None:
    tally = replay(trace((0.0, None, 0.0), (10.0, None, 0.0)), "round_robin", HARDWARE)
    assert tally.wall_secs == pytest.approx(10.5)
    assert tally.first_token_secs == pytest.approx(0.2)
    assert tally.shares == [1, 1]


@pytest.mark.parametrize(("recorded_at", "over"), [(0.6, 0.5 + 0.3 + 0.5), (9.0, 9.5)])
def test_a_next_turn_comes_after_its_answer_and_never_early(recorded_at: float, over: float) -> None:
    tally = replay(trace((0.0, None, 0.0), (recorded_at, 0, 0.3)), "round_robin", HARDWARE)
    assert tally.wall_secs == pytest.approx(over)


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    calls = [(100.0 * number, None, 0.0) for number in range(4)]
    one, two, four = (replay(trace(*calls), "round_robin", HARDWARE, concurrency) for concurrency in (1, 2, 9))
    assert [each.requests for each in (one, two, four)] == [4] * 3
    assert one.wall_secs == pytest.approx(2.0, abs=0.01)
    assert two.wall_secs == pytest.approx(1.0, abs=0.01)
    assert four.wall_secs == pytest.approx(0.7, abs=0.01)


def test_a_closed_loop_sends_a_next_turn_as_soon_as_it_can() -> None:
    tally = replay(trace((0.0, None, 0.0), (9.0, 0, 8.0), (10.0, 1, 0.5)), "round_robin", HARDWARE, 5)
    assert (tally.requests, tally.wall_secs) == (3, pytest.approx(1.5, abs=0.01))


def test_it_comes_out_the_same_each_time() -> None:
    calls = trace(*((0.01 * number, None, 0.0) for number in range(50)))
    assert replay(calls, "prefix", HARDWARE, 8) == replay(calls, "prefix", HARDWARE, 8)


def test_a_request_that_fits_no_replica_is_said() -> None:
    with pytest.raises(ConfigError, match="--capacity-tokens 111 is less than one request of 105 tokens"):
        replay(trace((0.0, None, 0.0)), "prefix", Hardware(replicas=1, capacity_tokens=111))


def test_nothing_is_nothing() -> None:
    assert replay(Trace(), "prefix", HARDWARE) == Tally(shares=[0, 0])


@pytest.mark.parametrize("policy", POLICIES)
async def test_what_a_proxy_did_comes_out_again(tmp_path: Path, policy: str) -> None:
    """Groups of four in two turns, one after the other: the same decisions, the same reuse."""
    file = tmp_path / "r.jsonl"
    options = {"policy": policy, "receipts": str(file)}
    async with SimFleet(3, capacity_blocks=2000) as sims, running(sims.urls, tmp_path / "state", **options) as it:
        cached = 0
        for group in range(4):
            shared = list(range(10_000, 10_040))
            prompt = shared + [20_000 + group * 1000 + at for at in range(300)]
            for seed in range(4):
                first = (await it.complete("base", prompt, seed=seed, max_tokens=40)).json()
                answer = first["choices"][0]["token_ids"]
                asked = [*prompt, *answer, *range(30_000 + 100 * seed, 30_080 + 100 * seed)]
                second = (await it.complete("base", asked, max_tokens=8)).json()
                cached += sum(one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second))
    recorded = read([str(file)])
    assert [one.after is not None for one in recorded.calls] == [False, True] * 16
    tally = replay(recorded, policy, Hardware(replicas=3, capacity_tokens=32_000), concurrency=1)
    assert tally.requests == 32
    if policy in ("prefix", "round_robin"):  # the others go by addresses, or by who is quicker
        assert tally.cached_tokens == pytest.approx(cached, rel=0.05)
