"""Small sums over measured numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least `part` (0 to 1) of all values do not exceed; NaN of none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-part * len(ordered) // 1) - 1))]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Rise of the least-squares line through (x, y) points; 0 for fewer than two different x."""
    if not points:
        return 0.0
    middle_x = sum(x for x, _ in points) / len(points)
    middle_y = sum(y for _, y in points) / len(points)
    spread = sum((x - middle_x) ** 2 for x, _ in points)
    return sum((x - middle_x) * (y - middle_y) for x, y in points) / spread if spread else 0.0


def longest_gap(times: Sequence[float]) -> float:
    """The longest time between two neighbours; 0 for fewer than two."""
    return max((b - a for a, b in pairwise(times)), default=0.0)


def scale(value: float) -> float:
    """A round number, not less than `value`, whose quarters are round too: the top of an axis."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 6, 8, 10, 20) if power * step >= value)
