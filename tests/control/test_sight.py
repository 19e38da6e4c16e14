from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from proxy.control.adapter_files import Fingerprint, Seen
from proxy.control.plane import Plane
from proxy.control.sight import STAT_SECS, fingerprint, look, mark, see
from tests.control.virtual_time import run

MARK: Fingerprint = (("adapter_config.json", 1, 1, 1),)
SEEN = Seen("sha256:1", MARK)


class Slow:
    """Calls that take as many seconds as they are told."""

    def __init__(self, *, stat: float = 0.0, read: float = 0.0, there: bool = True) -> None:
        self.stat, self.read, self.there = stat, read, there
        self.files = self
        self.hanging: dict[str, Any] = {}
        self.begun = 0

    def look(self, path: str) -> tuple[float, Any]:
        return self.read, SEEN

    def fingerprint(self, path: str) -> tuple[float, Any]:
        return self.stat, MARK if self.there else None

    async def in_thread(self, call: Any, path: str) -> Any:
        self.begun += 1
        secs, result = call(path)
        await asyncio.sleep(secs)
        return result

    @property
    def plane(self) -> Plane:
        return cast(Plane, self)


def test_what_is_there_and_what_is_not() -> None:
    async def main() -> None:
        assert await see(Slow().plane, "/a") == SEEN
        assert await see(Slow(there=False).plane, "/a") is None
        assert await mark(Slow(stat=STAT_SECS - 1).plane, "/a") == MARK
        assert await look(Slow(read=100).plane, "/a") == SEEN

    run(main())


def test_a_mount_that_hangs() -> None:
    async def main() -> None:
        slow = Slow(stat=1000)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await see(slow.plane, "/a")
            assert await look(slow.plane, "/a") is None
            assert await fingerprint(slow.plane, "/a") is None
        assert slow.begun == 1
        assert await fingerprint(slow.plane, "/b") is None
        assert slow.begun == 2
        await asyncio.sleep(1000)
        slow.stat = 0
        assert await fingerprint(slow.plane, "/a") == MARK

    run(main())


def test_reading_has_a_limit_of_its_own() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        assert await look(Slow(read=1000).plane, "/a", secs=30) is None
        assert clock() - began == pytest.approx(30)

    run(main())
