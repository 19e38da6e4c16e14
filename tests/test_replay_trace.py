"""From files to calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.errors import ConfigError
from proxy.lease import Usage
from proxy.receipt_line import Lines
from proxy.replay_trace import USUAL_OUTPUT, Trace, read
from tests.receipt_samples import DataPath

PROMPT = list(range(10_000, 10_200))
ANSWER = list(range(20_000, 20_050))


def written(path: Path, *entries: tuple[float, dict[str, Any]]) -> Trace:
    """`entries` are arrival times and what `DataPath.outcome` takes."""
    data_path, lines = DataPath(), Lines()
    path.write_bytes(b"".join(lines.line(at, data_path.outcome(**{"prompt": PROMPT, **what})) for at, what in entries))
    return read([str(path)])


def test_calls_come_in_the_order_of_arrival(tmp_path: Path) -> None:
    trace = written(tmp_path / "r", (103.0, {"model": "b"}), (101.5, {"model": "a"}), (102.0, {"salt": "s"}))
    assert [(one.call.model, one.at) for one in trace.calls] == [("a", 0.0), ("p-v1", 0.5), ("b", 1.5)]
    first, second, third = (one.call for one in trace.calls)
    assert first.adapter and len(first.prompts[0]) == 200 and first.outputs == (8,) and first.max_tokens == 64
    assert len({first.salt, second.salt, third.salt}) == 3
    assert (trace.replicas, trace.longest) == (1 + max(one.receipt.replica or 0 for one in trace.calls), 208)


def test_the_replicas_own_count_beats_the_estimate(tmp_path: Path) -> None:
    trace = written(tmp_path / "r", (1.0, {"prompt": "word " * 200, "usage": Usage(231, 0, 12)}))
    assert len(trace.calls[0].call.prompts[0]) == 231


def test_batches_and_several_answers(tmp_path: Path) -> None:
    trace = written(tmp_path / "r", (1.0, {"prompt": [PROMPT, PROMPT[:100]], "n": 2, "usage": Usage(300, 0, 41)}))
    call = trace.calls[0].call
    assert [len(prompt) for prompt in call.prompts] == [200, 100]
    assert (call.n, call.outputs) == (2, (11, 10, 10, 10))


def test_what_was_not_answered_whole_is_left_out(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "r",
        (1.0, {}),
        (2.0, {"status": 400}),
        (3.0, {"status": None, "left": True}),
        (4.0, {"cut": True}),
        (5.0, {"left": True}),
        (6.0, {"prompt": 5}),
    )
    assert (len(trace.calls), trace.unanswered, trace.without_prompt) == (1, 4, 1)


def test_unknown_lengths_are_the_usual_ones(tmp_path: Path) -> None:
    trace = written(tmp_path / "r", (1.0, {"usage": None}), (2.0, {"usage": Usage(200, 0, 20)}))
    assert [one.call.outputs for one in trace.calls] == [(20,), (20,)] and trace.assumed == 1
    trace = written(tmp_path / "r", (1.0, {"usage": None}), (2.0, {"usage": None, "max_tokens": 5}))
    assert [one.call.outputs for one in trace.calls] == [(min(64, USUAL_OUTPUT),), (5,)]


def test_a_next_turn_waits_for_the_answer(tmp_path: Path) -> None:
    turn = {"prompt": [*PROMPT, *ANSWER, *range(30_000, 30_100)]}
    trace = written(tmp_path / "r", (10.0, {"answer": ANSWER}), (12.0, turn))
    second = trace.calls[1]
    assert second.after == 0 and second.pause == pytest.approx(1.5)
    # The same tokens before the answer was there: a coincidence.
    trace = written(tmp_path / "r", (10.0, {"answer": ANSWER}), (10.2, turn))
    assert trace.calls[1].after is None


def test_several_files_lines_that_are_none_and_a_limit(tmp_path: Path) -> None:
    data_path, lines = DataPath(), Lines()
    old, new = tmp_path / "r.1", tmp_path / "r"
    old.write_bytes(lines.line(1.0, data_path.outcome(PROMPT)) + b'{"id":"cm')
    broken = lines.line(3.0, data_path.outcome(PROMPT)).replace(b"[[96,", b"[[0,")
    many = lines.line(3.0, replace(data_path.outcome(PROMPT), n=10**9))
    new.write_bytes(b"\n" + broken + many + lines.line(2.0, data_path.outcome(PROMPT)) + b"\xff\n")
    trace = read([str(new), str(old)])
    assert [one.receipt.time for one in trace.calls] == [1.0, 2.0]
    assert trace.calls[0].call.prompts[0] is trace.calls[1].call.prompts[0]
    assert trace.unreadable == 5
    assert len(read([str(new), str(old)], limit=1).calls) == 1


@pytest.mark.parametrize("name", ["none", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read([str(tmp_path / name)])


def test_an_empty_file_is_an_empty_trace(tmp_path: Path) -> None:
    trace = written(tmp_path / "r")
    assert (trace.calls, trace.replicas, trace.longest) == ([], 1, 0)
