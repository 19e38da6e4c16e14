import random

from benchmarks.weight_sync import lags


def test_lags_go_from_half_to_all() -> None:
    assert sorted(lags(3.0, 3, random.Random(1))) == [2.0, 2.5, 3.0]
    assert lags(0.5, 1, random.Random(1)) == [0.5]
    assert lags(1.0, 8, random.Random(1)) == lags(1.0, 8, random.Random(1)) != lags(1.0, 8, random.Random(2))
