"""A mount whose server is gone: whoever touches it hangs. The proxy takes it for a place that it does not see; the
replicas decide, nothing else waits, and the proxy ends when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.control import adapter_files
from proxy.control.adapter_files import Fingerprint, Seen
from tests.faults.rig import quick, rig, weights_of  # noqa: F401


class Mount:
    """Everything below a path that contains `word` hangs, until it is released."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.released = threading.Event()
        self.touched = 0

    def look(self, path: str) -> Seen | None:
        self._touch(path)
        return adapter_files.look(path)

    def fingerprint(self, path: str) -> Fingerprint | None:
        self._touch(path)
        return adapter_files.fingerprint(path)

    def _touch(self, path: str) -> None:
        if self.word in path:
            self.touched += 1
            self.released.wait()


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    monkeypatch.setattr("proxy.control.sight.STAT_SECS", 0.1)
    it = Mount("seed-2")
    yield it
    it.released.set()


async def test_the_replicas_decide(mount: Mount, tmp_path: Path) -> None:
    async with rig(2, tmp_path) as it:
        it.parts.plane.files = mount
        await it.must_load("a", it.library.path(1))
        await it.must_load("b", it.library.path(2))
        assert mount.touched
        await it.check()


async def test_nobody_else_waits(mount: Mount, tmp_path: Path) -> None:
    """More loads than there are threads for files."""
    async with rig(2, tmp_path, max_loras=40) as it:
        it.parts.plane.files = mount
        loads = [asyncio.create_task(it.load(f"b{n}", it.library.path(2))) for n in range(20)]
        await it.until(lambda: mount.touched, "touched")
        async with asyncio.timeout(20):
            assert (await it.pause()).ok
            assert (await it.resume()).ok
            answers = await asyncio.gather(*loads)
        assert {answer.status for answer in answers} == {200}
        await it.must_load("a", it.library.path(1))
        it.names |= {f"b{n}": weights_of(it.library.path(2)) for n in range(20)}
        await it.settle()


async def test_not_given_up_because_of_it(mount: Mount, tmp_path: Path) -> None:
    """The replicas restart while the mount hangs on all machines: the adapter is loaded when it is back."""
    async with rig(2, tmp_path, control={"lost_files_secs": 0.1}) as it:
        await it.must_load("b", it.library.path(2))
        it.parts.plane.files = mount
        for replica in it.replicas:
            replica.faults.add("not_visible", "load", name="b")
        for index in range(2):
            await it.sims.restart(index)
        before = sum(replica.calls["load"] for replica in it.replicas)
        await it.until(lambda: sum(replica.calls["load"] for replica in it.replicas) > before + 8, "asked for")
        assert mount.touched <= 2  # a thread that hangs is enough for both
        assert "b" in it.parts.fleet.desired.adapters
        for replica in it.replicas:
            replica.faults.clear()
        mount.released.set()
        await it.check()


@pytest.mark.parametrize("path", ["/" + "x/" * 3000, "/a\ud800b", "/a\0b", "/" + "y" * 300])
async def test_paths_that_no_file_system_takes(path: str, tmp_path: Path) -> None:
    async with rig(1, tmp_path, options={"load_deadline_secs": 0.5}) as it:
        answer = await it.load("a", path)
        assert answer.status in (400, 502, 504), answer.text
        await it.check()


async def test_a_configuration_that_is_nested_without_end(tmp_path: Path) -> None:
    async with rig(1, tmp_path) as it:
        path = it.library.path(1, "deep")
        (path / "adapter_config.json").write_text("[" * 100_000)
        assert adapter_files.look(str(path)) is None
        answer = await it.load("a", path)
        assert answer.status is not None and answer.status != 200
        await it.check()
