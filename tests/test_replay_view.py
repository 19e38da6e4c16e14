"""The comparison as it is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proxy.receipt_line import Lines
from proxy.replay_trace import read
from proxy.replay_view import recorded
from tests.receipt_samples import DataPath
from tests.test_cli import lorafleet


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two groups of four, half a second apart, and one request that failed."""
    path, lines = DataPath(), Lines()
    out = []
    for number in range(8):
        prompt = [10_000 * (1 + number // 4) + at for at in range(160)]
        out.append(lines.line(100.0 + number / 2, path.outcome(prompt, stream=number > 5, model="base", adapter=False)))
    out.append(lines.line(104.0, path.outcome([1], status=503)))
    file = tmp_path / "r.jsonl"
    file.write_bytes(b"".join(out))
    return file


def test_what_the_receipts_say(file: Path) -> None:
    row = recorded(read([str(file)]))
    assert (row.name, row.requests, row.prompt_tokens, row.cached_tokens) == ("as recorded", 8, 1280, 6 * 144)
    assert row.reuse == pytest.approx(6 * 144 / 1280)
    assert (row.balance, row.wall_secs, row.first_token_secs) == pytest.approx((1.0, 4.0, 0.25))


def test_the_table(file: Path) -> None:
    done = lorafleet("replay", str(file), "--all")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert rows == ["as recorded", "prefix", "consistent_hash", "least_loaded", "round_robin"]
    assert "8 requests, as they came, on 2 simulated replicas" in done.stdout
    assert "1 requests got no whole answer" in done.stdout


def test_json(file: Path) -> None:
    args = ("--json", "--policy", "prefix", "--replicas", "3", "--concurrency", "2", "--decode-tps", "100")
    done = lorafleet("replay", str(file), *args)
    got = json.loads(done.stdout)
    assert got["hardware"]["replicas"] == 3 and got["hardware"]["decode_tps"] == 100 and got["concurrency"] == 2
    assert got["left_out"] == {"unreadable": 0, "unanswered": 1, "without_prompt": 0, "assumed": 0}
    assert [row["name"] for row in got["rows"]] == ["as recorded", "prefix"]
    assert got["rows"][1]["reuse"] == pytest.approx(6 * 144 / 1280)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--policy", "best"], 2, "--policy"),
        (["--replicas", "0"], 2, "--replicas"),
        (["--capacity-tokens", "32"], 2, "--capacity-tokens"),
    ],
)
def test_wrong_usage(file: Path, args: list[str], code: int, said: str) -> None:
    done = lorafleet("replay", str(file), *args)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_nothing_to_replay_is_exit_1(tmp_path: Path) -> None:
    empty = tmp_path / "r"
    empty.write_text("no receipt\n")
    done = lorafleet("replay", str(empty))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"lorafleet: nothing to replay in {empty}; 1 lines are no receipts\n"
