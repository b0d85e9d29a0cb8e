"""Intervals of means of few values, such as one per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""97.5 % quantiles of Student's t by degrees of freedom."""


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval; the half width is NaN for one value.

    Raises:
        KeyError: more than ten values.
    """
    if len(values) < 2:
        return values[0], math.nan
    half = T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half
