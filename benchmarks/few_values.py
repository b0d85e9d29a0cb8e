"""Intervals of means of few values, such as one per seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from mrlm_pl.evaluation.intervals import t_quantile


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval; the half width is NaN for one value."""
    if len(values) < 2:
        return values[0], math.nan
    quantile = round(t_quantile(len(values) - 1), 3)  # as in the tables behind the files of results
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
