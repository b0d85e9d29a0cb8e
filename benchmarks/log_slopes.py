"""Growth of costs with a quantity: slopes of their logarithms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

LEAST = {"cpu_s": 0.0, "memory_mib": 4.0}
"""Smaller costs are not fitted: memory of this size is that of pages of code and of the allocator."""


def slopes(points: Iterable[Mapping[str, Any]], measure: str) -> tuple[float, float] | None:
    """Return the slope over all points and between the last two, 1 for linear growth; None for too few points.

    Args:
        points: each with its ``x`` and, unless it could not be measured, its costs.
        measure: name of the cost.

    >>> found = slopes([{"x": 1, "cpu_s": 2.0}, {"x": 2, "cpu_s": 4.0}, {"x": 4, "cpu_s": 16.0}], "cpu_s")
    >>> [round(slope, 6) for slope in found or ()]
    [1.5, 2.0]
    """
    known = [
        (math.log(point["x"]), math.log(point[measure]))
        for point in sorted(points, key=lambda point: point["x"])
        if point.get(measure, 0.0) > LEAST[measure]
    ]
    if len(known) < 2:
        return None
    x, y = zip(*known, strict=True)
    return statistics.linear_regression(x, y).slope, (y[-1] - y[-2]) / (x[-1] - x[-2])
