import math

import pytest

from benchmarks.figures import longest_gap, percentile, scale, slope


@pytest.mark.parametrize(
    ("values", "part", "expected"),
    [([3.0], 0.5, 3.0), ([4, 1, 3, 2], 0.5, 2), ([4, 1, 3, 2], 0.51, 3), ([1, 2], 0.0, 1), (range(1, 101), 0.99, 99)],
)
def test_percentile(values: list[float], part: float, expected: float) -> None:
    assert percentile(list(values), part) == expected
    assert percentile(list(values), 1.0) == max(values)


def test_percentile_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))


def test_slope() -> None:
    assert slope([(x, 3.0 * x + 7) for x in range(5)]) == pytest.approx(3.0)
    assert slope([(0, 1), (1, 3), (2, 1)]) == 0
    assert slope([]) == slope([(1, 5)]) == slope([(1, 5), (1, 9)]) == 0


def test_longest_gap() -> None:
    assert longest_gap([1.0, 2.0, 5.0, 6.0]) == 3.0
    assert longest_gap([]) == longest_gap([4.0]) == 0


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (1.0, 1.0), (3.25, 4.0), (264, 400), (0.03, 0.04), (99.9, 100), (600, 600)]
)
def test_scale(value: float, top: float) -> None:
    assert scale(value) == pytest.approx(top)
