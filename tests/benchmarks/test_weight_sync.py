import random

import pytest

from benchmarks import weight_sync
from benchmarks.weight_sync import lags


def test_lags_go_from_half_to_all() -> None:
    assert sorted(lags(3.0, 3, random.Random(1))) == [2.0, 2.5, 3.0]
    assert lags(0.5, 1, random.Random(1)) == [0.5]
    assert lags(1.0, 8, random.Random(1)) == lags(1.0, 8, random.Random(1)) != lags(1.0, 8, random.Random(2))


async def test_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "QUIET_SECS", 0.2)
    monkeypatch.setattr(weight_sync, "AFTER_SECS", 0.1)
    monkeypatch.setattr(weight_sync, "OUTPUT_TOKENS", 8)
    (cell,) = await weight_sync.measure(2, "eager", [0.1], publishes=2)
    assert min(cell.routable) >= 0.1
    assert all(sync > routable for sync, routable in zip(cell.sync, cell.routable, strict=True))
    assert len(cell.tokens) == len(cell.lost) == 2
    assert cell.quiet > 0
