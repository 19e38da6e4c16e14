"""Receipts from the data path to the file, and everything that may be in the way."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from proxy import receipts as module
from proxy.receipt_file import ReceiptFile
from proxy.receipt_line import Receipt, decode
from proxy.receipts import ReceiptCounts, Receipts
from proxy.simulator.adapters import write_adapter
from proxy.simulator.embed import SimFleet
from proxy.web.observe import Observer
from tests.receipt_samples import DataPath
from tests.test_cli import lorafleet
from tests.web.running import running

PROMPT = list(range(1000, 1400))


def read(path: Path) -> list[Receipt]:
    return [decode(line) for line in path.read_bytes().splitlines()]


def receipts(path: Path, max_bytes: int = 1 << 20) -> tuple[Receipts, ReceiptCounts]:
    counts = ReceiptCounts()
    return Receipts(ReceiptFile(path, max_bytes), counts, clock=lambda: 1000.0), counts


def test_what_is_over_is_in_the_file_after_the_close(tmp_path: Path) -> None:
    it, counts = receipts(tmp_path / "r")
    observer: Observer = it
    path = DataPath()
    it.start()
    for number in range(100):
        observer.finished(path.outcome(PROMPT, response_id=str(number)))
    observer.retried(0, "reset")
    it.close()
    got = read(tmp_path / "r")
    assert [each.id for each in got] == [str(number) for number in range(100)]
    assert got[0].time == 999.5
    assert counts == ReceiptCounts(written=100)


def test_only_completions_get_one(tmp_path: Path) -> None:
    it, _ = receipts(tmp_path / "r")
    it.finished(DataPath().outcome(PROMPT, path="/v1/completions"))
    it.finished(replace(DataPath().outcome(PROMPT), path="/tokenize"))
    it.drain()
    assert len(read(tmp_path / "r")) == 1


def test_each_file_spells_out_its_own_prompts(tmp_path: Path) -> None:
    it, _ = receipts(tmp_path / "r", max_bytes=1000)
    path = DataPath()
    for _ in range(3):
        it.finished(path.outcome(PROMPT))
        it.finished(path.outcome(PROMPT))
        it.drain()
    for name in ("r.2", "r.1", "r"):
        first, second = read(tmp_path / name)
        assert first.prompts[0].blocks and second.prompts[0].blocks is None


def test_a_queue_that_is_full_loses_what_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE", 2)
    it, counts = receipts(tmp_path / "r")
    for number in range(5):
        it.finished(DataPath().outcome(PROMPT, response_id=str(number)))
    it.drain()
    it.finished(DataPath().outcome(PROMPT, response_id="later"))
    it.drain()
    assert [each.id for each in read(tmp_path / "r")] == ["0", "1", "later"]
    assert counts == ReceiptCounts(written=3, overflow=3)


def test_large_answers_fill_the_queue_by_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUEUE_BYTES", 20_000)
    it, counts = receipts(tmp_path / "r")
    for _ in range(3):
        it.finished(DataPath().outcome([1, 2], answer=[7] * 3000))
    assert counts.overflow == 1
    it.drain()
    it.finished(DataPath().outcome([1, 2], answer=[7] * 3000))
    it.drain()
    assert counts == ReceiptCounts(written=3, overflow=1)


def test_a_full_disk_is_said_once_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it, counts = receipts(tmp_path / "r")
    path = DataPath()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", full)
        for number in range(3):
            it.finished(path.outcome(PROMPT, response_id=str(number)))
            it.drain()
    assert counts == ReceiptCounts()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "No space left" in caplog.text
    it.finished(path.outcome(PROMPT, response_id="3"))
    it.drain()
    got = read(tmp_path / "r")
    assert [each.id for each in got] == ["0", "1", "2", "3"]
    assert got[0].prompts[0].blocks and got[1].prompts[0].blocks is None
    assert counts == ReceiptCounts(written=4)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]


def test_what_a_broken_disk_never_took_is_counted_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    it, counts = receipts(tmp_path / "r")
    (tmp_path / "r").unlink()
    (tmp_path / "r").mkdir()
    it.start()
    it.finished(DataPath().outcome(PROMPT))
    it.close()
    assert counts == ReceiptCounts(failed=1)
    assert "Is a directory" in caplog.text


def test_one_that_cannot_be_put_into_words_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    it, counts = receipts(tmp_path / "r")
    path = DataPath()
    it.finished(path.outcome(PROMPT, response_id=object()))
    it.finished(path.outcome(PROMPT, response_id="good"))
    it.drain()
    assert [each.id for each in read(tmp_path / "r")] == ["good"]
    assert counts == ReceiptCounts(written=1, failed=1)


async def test_a_running_proxy_writes_who_made_which_sample(tmp_path: Path) -> None:
    file = tmp_path / "receipts.jsonl"
    write_adapter(tmp_path / "a" / "p-v1", 1)
    async with SimFleet(2) as sims, running(sims.urls, tmp_path / "state", receipts=str(file)) as it:
        await it.load("p-v1", tmp_path / "a" / "p-v1")
        answers = [await it.complete("p-v1", PROMPT, cache_salt="s3cret") for _ in range(2)]
        missing = await it.complete("p-v9", PROMPT)
        chat = {"model": "base", "stream": True, "messages": [{"role": "user", "content": "hello Ottokar"}]}
        streamed = await it.client.post("/v1/chat/completions", json=chat)
        assert (await it.client.post("/tokenize", json={"model": "base", "prompt": "x"})).status_code == 200
        metrics = (await it.client.get("/metrics")).text
    assert "lorafleet_receipts_total" in metrics and 'lorafleet_receipts_lost_total{reason="queue full"} 0.0' in metrics
    got = read(file)
    assert [each.status for each in got] == [200, 200, 404, 200] and missing.status_code == 404
    for answer, each in zip(answers, got, strict=False):
        assert each.id == answer.json()["id"]
        assert each.digest == answer.headers["x-lorafleet-digest"]
        assert str(each.replica) == answer.headers["x-lorafleet-replica"]
        assert each.route == answer.headers["x-lorafleet-route"]
        assert (each.adapter, each.prompt_tokens, each.output_tokens, each.attempts) == ("p-v1", 400, 8, 1)
        assert each.output is not None
    assert got[1].predicted_cached_tokens == got[1].cached_tokens == 384
    assert got[1].prompts[0].id == got[0].prompts[0].id
    assert got[3].stream and got[3].id is not None and got[3].id in streamed.text
    text = file.read_text()
    assert "s3cret" not in text and "Ottokar" not in text and "http" not in text


async def test_a_divided_batch_is_one_line_with_the_sums(tmp_path: Path) -> None:
    file = tmp_path / "receipts.jsonl"
    prompts = [[1000 * number + position for position in range(50)] for number in range(3)]
    async with SimFleet(3) as sims, running(sims.urls, tmp_path / "state", receipts=str(file)) as it:
        answers = [await it.complete("base", prompts, n=2) for _ in range(2)]
    for answer, each in zip(answers, read(file), strict=True):
        assert each.id == answer.json()["id"]
        assert ",".join(map(str, each.replicas)) == answer.headers["x-lorafleet-replica"]
        assert (each.replica, each.status, each.n, each.attempts) == (each.replicas[0], 200, 2, 1)
        assert (each.prompt_tokens, each.output_tokens, each.output) == (150, 48, None)
        assert str(each.predicted_cached_tokens) == answer.headers["x-lorafleet-predicted-cached-tokens"]
        assert [prompt.size for prompt in each.prompts] == [len(f"{','.join(map(str, it))},") for it in prompts]
    first, again = read(file)
    assert first.replicas == again.replicas and sorted(again.replicas) == [0, 1, 2]
    assert (again.predicted_cached_tokens, again.cached_tokens) == (3 * 48, 3 * 48)
    assert [prompt.id for prompt in first.prompts] == [prompt.id for prompt in again.prompts]


@pytest.mark.parametrize("name", ["none/r.jsonl", "."])
def test_a_file_that_cannot_be_written_is_said_before_anything_starts(tmp_path: Path, name: str) -> None:
    state = tmp_path / "state"
    args = ["serve", "http://127.0.0.1:9", "--port", "0", "--state-dir", str(state)]
    done = lorafleet(*args, "--receipts", str(tmp_path / name))
    assert done.returncode == 2
    assert done.stderr.startswith("lorafleet: --receipts ") and len(done.stderr.splitlines()) == 1
