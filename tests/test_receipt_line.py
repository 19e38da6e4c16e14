"""What is in a receipt, and what is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from proxy.receipt_line import Lines, Receipt, blocks, decode
from proxy.routing.blocks import STRIDES
from tests.receipt_samples import DataPath

ROOT = Path(__file__).parent.parent
PROMPT = list(range(1000, 1400))


def receipt(lines: Lines, outcome: object, time: float = 100.0) -> Receipt:
    return decode(lines.line(time, outcome))  # type: ignore[arg-type]


def test_every_field_of_a_completion() -> None:
    line = Lines().line(1234.5678901, DataPath().outcome(PROMPT, answer=range(2000, 2100)))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    got = json.loads(line)
    prompt, output = got.pop("prompts")[0], got.pop("output")
    assert len(got.pop("seed")) == len(prompt.pop("id")) == 16
    assert len(blocks(prompt.pop("blocks"))) == 400 * 5 // STRIDES[0][0]
    assert prompt == {"tokens": 400, "size": 2000}
    assert len(blocks(output.pop("blocks"))) == 500 * 5 // STRIDES[0][0] - 400 * 5 // STRIDES[0][0]
    assert output == {"size": 500}
    assert got == {
        "id": "cmpl-1",
        "time": 1234.56789,
        "path": "/v1/completions",
        "model": "p-v1",
        "adapter": "p-v1",
        "digest": "sha256:aa",
        "upstream": "p-v1",
        "replica": got["replica"],
        "route": "new",
        "predicted_cached_tokens": 0,
        "cached_tokens": 0,
        "prompt_tokens": 400,
        "output_tokens": 100,
        "n": 1,
        "max_tokens": 64,
        "stream": False,
        "status": 200,
        "cut": False,
        "left": False,
        "attempts": 1,
        "waited_secs": 0.0,
        "first_byte_secs": 0.25,
        "total_secs": 0.5,
        "strides": [list(stride) for stride in STRIDES],
        "replicas": [],
    }


def test_a_request_that_nobody_was_asked() -> None:
    nothing = {"replica": None, "decision": None, "served": None, "usage": None, "response_id": None}
    got = receipt(
        Lines(), DataPath().outcome(PROMPT, **nothing, status=None, first_byte_secs=None, attempts=0, left=True)
    )
    assert (got.id, got.replica, got.route, got.prompts, got.seed, got.status) == (None, None, None, [], None, None)
    assert got.left and got.first_byte_secs is None


def test_a_base_model_is_no_adapter() -> None:
    got = receipt(Lines(), DataPath().outcome(PROMPT, model="base", adapter=False))
    assert (got.model, got.adapter, got.digest, got.upstream) == ("base", None, None, "base")


def test_a_prompt_is_spelled_out_once_a_file() -> None:
    lines, path = Lines(), DataPath()
    first, second = (receipt(lines, path.outcome(PROMPT)) for _ in range(2))
    assert first.prompts[0].blocks and second.prompts[0].blocks is None
    assert first.prompts[0].id == second.prompts[0].id
    lines.forget()
    assert receipt(lines, path.outcome(PROMPT)).prompts == first.prompts


def test_equal_beginnings_are_equal_and_the_rest_is_not() -> None:
    lines, path = Lines(), DataPath()
    one, longer = receipt(lines, path.outcome(PROMPT)), receipt(lines, path.outcome(PROMPT + [7] * 100))
    other = receipt(lines, path.outcome([9, *PROMPT]))
    hashes = [blocks(each.prompts[0].blocks or "") for each in (one, longer, other)]
    assert hashes[1][: len(hashes[0])] == hashes[0]
    assert not set(hashes[0]) & set(hashes[2])
    assert one.seed == longer.seed == other.seed
    assert len({each.prompts[0].id for each in (one, longer, other)}) == 3


def test_prompts_that_differ_after_their_last_block_have_ids_of_their_own() -> None:
    lines, path = Lines(), DataPath()
    one, other = (receipt(lines, path.outcome([*PROMPT, last])) for last in (5, 6))
    assert one.prompts[0].blocks == other.prompts[0].blocks
    assert one.prompts[0].id != other.prompts[0].id


def test_model_and_salt_part_what_is_equal() -> None:
    lines, path = Lines(), DataPath()
    all_three = [path.outcome(PROMPT), path.outcome(PROMPT, model="p-v2"), path.outcome(PROMPT, salt="s3cret")]
    got = [receipt(lines, each) for each in all_three]
    assert len({each.seed for each in got}) == len({each.prompts[0].id for each in got}) == 3
    assert "s3cret" not in str(got)


def test_the_next_turn_continues_the_answers_blocks() -> None:
    lines, path = Lines(), DataPath()
    answer = list(range(3000, 3060))
    first = receipt(lines, path.outcome(PROMPT, answer=answer))
    turn = receipt(lines, path.outcome([*PROMPT, *answer, *range(4000, 4100)]))
    assert first.output is not None
    known = blocks(first.prompts[0].blocks or "") + blocks(first.output.blocks)
    assert blocks(turn.prompts[0].blocks or "")[: len(known)] == known


@pytest.mark.parametrize(("changes", "count"), [({"n": 3}, 1), ({"prompt": [PROMPT, [1, 2, 3]]}, 2)])
def test_of_several_answers_none_is_described(changes: dict[str, object], count: int) -> None:
    outcome = DataPath().outcome(**{"prompt": PROMPT, "answer": [5, 6], **changes})
    got = receipt(Lines(), outcome)
    assert got.output is None and len(got.prompts) == count and got.n == changes.get("n", 1)


def test_no_content_gets_into_the_file() -> None:
    lines, path = Lines(), DataPath()
    secret = "the patient's name is Ottokar"
    line = lines.line(1.0, path.outcome(secret * 20)) + lines.line(
        1.0, path.outcome([{"role": "user", "content": secret}], path="/v1/chat/completions")
    )
    assert b"Ottokar" not in line and b"patient" not in line


def test_a_guess_cannot_be_tried_in_another_process() -> None:
    code = (
        "from proxy.receipt_line import Lines, decode; from tests.receipt_samples import DataPath;"
        "print(decode(Lines().line(1.0, DataPath().outcome(list(range(1000, 1400))))).prompts[0].blocks)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={"PYTHONHASHSEED": "0"},
        ).stdout
        for _ in range(2)
    }
    assert len(runs) == 2


def test_what_is_no_receipt() -> None:
    for line in (b"", b"{}", b'{"id":1}', b"\xff"):
        with pytest.raises((msgspec.MsgspecError, UnicodeDecodeError)):
            decode(line)
