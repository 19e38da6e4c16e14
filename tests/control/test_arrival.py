from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from proxy.control.adapter_files import Fingerprint, Seen
from proxy.control.arrival import arrived, written_before
from proxy.control.plane import Plane
from proxy.errors import TransactionFailed


def mark(modified: int) -> Fingerprint:
    return (("adapter_config.json", 1, modified, 1), ("adapter_model.safetensors", 1, modified, 2))


WHOLE = Seen("sha256:1", mark(1))
OTHER = Seen("sha256:2", mark(2))
Look = tuple[Seen | None, Fingerprint | None]


class Script:
    """What each look shows; the last one for ever. A fingerprint is taken before each look, and after one that saw
    nothing whole."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.files = self
        self.looked = 0
        self.hanging: dict[str, Any] = {}
        self._before = True

    def look(self, path: str) -> Seen | None:
        self.looked += 1
        shown = self.looks[0][0]
        self._before = shown is not None
        if self._before:
            self._next()
        return shown

    def fingerprint(self, path: str) -> Fingerprint | None:
        shown = self.looks[0][1]
        if not self._before:
            self._before = True
            self._next()
        return shown

    def _next(self) -> None:
        if len(self.looks) > 1:
            self.looks.pop(0)

    async def in_thread(self, call: Any, *arguments: Any) -> Any:
        return call(*arguments)


async def ask(script: Script, digest: str | None = None, secs: float = 30.0) -> Seen | None:
    return await arrived(cast(Plane, script), "/a", digest, asyncio.get_running_loop().time() + secs)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.control.arrival.FIRST_LOOK_SECS", 0.001)
    monkeypatch.setattr("proxy.control.arrival.SETTLED_SECS", 0.05)


async def test_whole_at_once() -> None:
    script = Script((WHOLE, WHOLE.fingerprint))
    assert await ask(script) is WHOLE
    assert await ask(script, WHOLE.digest) is WHOLE
    assert script.looked == 2


async def test_nothing_to_be_seen_is_not_waited_for() -> None:
    script = Script((None, None))
    assert await ask(script) is None
    assert await ask(script, "sha256:1") is None
    assert script.looked == 0


async def test_half_of_it_is() -> None:
    assert await ask(Script((None, mark(1)), (None, mark(2)), (WHOLE, WHOLE.fingerprint))) is WHOLE


async def test_half_of_it_for_good_is_the_replicas_affair() -> None:
    assert await ask(Script((None, mark(1)))) is None
    assert await ask(Script((None, mark(1))), "sha256:1") is None


async def test_another_digest_for_good() -> None:
    with pytest.raises(TransactionFailed) as caught:
        await ask(Script((OTHER, OTHER.fingerprint)), "sha256:1")
    assert caught.value.status == 409


async def test_the_deadline() -> None:
    with pytest.raises(TransactionFailed):
        await ask(Script((OTHER, OTHER.fingerprint)), "sha256:1", secs=0.0)


def test_written_before() -> None:
    assert written_before(Seen("sha256:1", mark(4_000_000_000)), 5.0)
    assert not written_before(Seen("sha256:1", mark(5_000_000_000)), 5.0)
    assert not written_before(Seen("sha256:1", (*mark(4_000_000_000), *mark(6_000_000_000))), 5.0)
