"""Files that are still being copied are not ready yet, files that are broken never will be (prime-rl #2391, gcsfuse
#4204, cog-comfyui #329): the first are waited for, the second refused at once. No replica keeps half an adapter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.rig import Rig, quick, rig, weights_of  # noqa: F401
from trainer_client.digest import adapter_digest

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def _nothing(path: Path, whole: Path) -> None:
    pass


def _directory_only(path: Path, whole: Path) -> None:
    path.mkdir()


def _config_only(path: Path, whole: Path) -> None:
    path.mkdir()
    (path / CONFIG).write_bytes((whole / CONFIG).read_bytes())


def _tensors_only(path: Path, whole: Path) -> None:
    path.mkdir()
    (path / TENSORS).write_bytes((whole / TENSORS).read_bytes())


def _empty_tensors(path: Path, whole: Path) -> None:
    _config_only(path, whole)
    (path / TENSORS).touch()


def _half_a_header(path: Path, whole: Path) -> None:
    _config_only(path, whole)
    (path / TENSORS).write_bytes((whole / TENSORS).read_bytes()[:100])


def _half_the_tensors(path: Path, whole: Path) -> None:
    _config_only(path, whole)
    raw = (whole / TENSORS).read_bytes()
    (path / TENSORS).write_bytes(raw[: len(raw) // 2 + 200])


def _one_byte_short(path: Path, whole: Path) -> None:
    _config_only(path, whole)
    (path / TENSORS).write_bytes((whole / TENSORS).read_bytes()[:-1])


def _half_a_config(path: Path, whole: Path) -> None:
    _tensors_only(path, whole)
    (path / CONFIG).write_bytes((whole / CONFIG).read_bytes()[:50])


STATES: list[Callable[[Path, Path], None]] = [
    _nothing,
    _directory_only,
    _config_only,
    _tensors_only,
    _empty_tensors,
    _half_a_header,
    _half_the_tensors,
    _one_byte_short,
    _half_a_config,
]


def complete(path: Path, whole: Path) -> None:
    """What was missing arrives, in place, as a copy does it."""
    path.mkdir(exist_ok=True)
    for name in (TENSORS, CONFIG):
        (path / name).write_bytes((whole / name).read_bytes())


@pytest.mark.parametrize("told", [True, False], ids=["with digest", "without"])
@pytest.mark.parametrize("state", STATES)
async def test_waited_for(state: Callable[[Path, Path], None], told: bool, tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"load_deadline_secs": 40.0}) as it:
        whole, path = it.library.path(1), tmp_path / "arriving"
        state(path, whole)
        more = {"digest": adapter_digest(whole)} if told else {}
        change = asyncio.create_task(it.load("a", path, **more))
        await asyncio.sleep(0.3)
        assert not change.done(), (await change).text
        assert (await it.complete("a")).status == 404
        complete(path, whole)
        answer = await change
        assert answer.ok, answer.text
        it.names["a"] = weights_of(whole)
        await it.check()


@pytest.mark.parametrize("state", STATES)
async def test_never_completed(state: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """The error says how long was waited, and for which replica; 404 would mean something else to TRL."""
    async with rig(2, tmp_path, options={"load_deadline_secs": 0.6}) as it:
        path = tmp_path / "arriving"
        state(path, it.library.path(1))
        answer = await it.load("a", path)
        assert answer.status == 504, answer.text
        assert "0.6 s" in answer.json()["error"]["message"]
        await it.check()


async def test_the_marker_is_there_before_the_data(tmp_path: Path) -> None:
    """A directory rename on an object store is a copy in any order: the files have their sizes and not yet their
    bytes. Only the digest tells."""
    async with rig(2, tmp_path, options={"load_deadline_secs": 40.0}) as it:
        whole, path = it.library.path(1), it.library.path(2, "arriving")
        change = asyncio.create_task(it.load("a", path, digest=adapter_digest(whole)))
        await asyncio.sleep(0.3)
        assert not change.done()
        assert [replica.calls["load"] for replica in it.replicas] == [0, 0]
        complete(path, whole)
        answer = await change
        assert answer.ok, answer.text
        it.names["a"] = weights_of(whole)
        await it.check()


async def test_files_that_are_others_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.control.arrival.SETTLED_SECS", 0.4)
    async with rig(2, tmp_path, options={"load_deadline_secs": 40.0}) as it:
        answer = await it.load("a", it.library.path(2), digest=adapter_digest(it.library.path(1)))
        assert answer.status == 409, answer.text
        assert [replica.calls["load"] for replica in it.replicas] == [0, 0]
        await it.check()


async def broken(it: Rig, path: Path) -> None:
    answer = await it.load("a", path)
    assert answer.status in (400, 502), answer.text
    assert sum(replica.calls["load"] for replica in it.replicas) <= 2  # nobody insists
    await it.check()


async def test_broken_is_not_waited_for(tmp_path: Path) -> None:
    async with rig(2, tmp_path, options={"load_deadline_secs": 100.0}, max_lora_rank=8) as it:
        await broken(it, it.library.path(1, "rank-16", rank=16))
        path = it.library.path(2, "dora")
        config = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**config, "use_dora": True}))
        for replica in it.replicas:
            replica.replica.calls.clear()
        await broken(it, path)


async def test_replaced_while_it_is_loaded(tmp_path: Path) -> None:
    """Nobody can say which bytes which replica read: undone everywhere, and the next try is a new one."""
    async with rig(2, tmp_path, load_secs=0.4, options={"load_deadline_secs": 40.0}) as it:
        path = it.library.path(1, "live")
        change = asyncio.create_task(it.load("a", path))
        await it.until(lambda: it.replicas[0].calls["load"], "asked")
        it.library.write(path, 2)
        answer = await change
        if answer.ok:
            it.names["a"] = weights_of(path)
        await it.check()
        await it.must_load("a", path)
        await it.check()
