"""Shares and means with their 95 % intervals, when some of the values depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def ratio_interval(sums: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """95 % normal interval of a share, when the cases of one group depend on each other.

    Args:
        sums: for each group how many cases have what is counted, and how many there are.

    >>> low, high = ratio_interval([(0, 1), (1, 1), (1, 1), (0, 1)])  # as mean_interval of single values
    >>> round(low, 4), round(high, 4)
    (-0.0658, 1.0658)
    """
    total = math.fsum(count for _, count in sums)
    share = math.fsum(value for value, _ in sums) / total
    clusters = sum(count > 0 for _, count in sums)
    if clusters < 2:
        return (-math.inf, math.inf)
    squares = math.fsum((value - share * count) ** 2 for value, count in sums)
    half = Z95 * math.sqrt(clusters / (clusters - 1) * squares) / total
    return (share - half, share + half)


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """95 % normal interval of the mean of all values, when values of one group depend on each other.

    The variance of the mean is that of a ratio estimator with groups as clusters; with one value in each group it is
    ``s^2 / n``. A single group tells nothing of the spread: the interval is infinite.

    >>> low, high = mean_interval([[0.0], [1.0], [1.0], [0.0]])
    >>> round(low, 4), round(high, 4)  # .5 +- 1.96 sqrt((1/3) / 4)
    (-0.0658, 1.0658)
    """
    total = sum(len(group) for group in groups)
    mean = math.fsum(value for group in groups for value in group) / total
    clusters = len(groups)
    if clusters < 2:
        return (-math.inf, math.inf)
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    half = Z95 * math.sqrt(clusters / (clusters - 1) * squares) / total
    return (mean - half, mean + half)


def clustered_wilson_interval(groups: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """95 % Wilson interval of the share of True, when the values of a group depend on each other.

    The number of trials is divided by the design effect: the variance that :func:`mean_interval` sees over that of
    independent values, but no less than 1.

    >>> twice = [[True, True]] * 9 + [[False, False]]    # worth 10 trials, less what 10 groups leave uncertain
    >>> [round(bound, 2) for bound in clustered_wilson_interval(twice)]
    [0.58, 0.98]
    """
    trials, wins = sum(map(len, groups)), sum(map(sum, groups))
    share = wins / trials
    low, high = mean_interval([[float(value) for value in group] for group in groups])
    independent = share * (1 - share) / trials
    effect = 1.0
    if independent and math.isfinite(high):
        effect = max(1.0, ((high - low) / (2 * Z95)) ** 2 / independent)
    return wilson_interval(wins / effect, trials / effect)


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """95 % Wilson score interval of a share (Wilson 1927).

    >>> low, high = wilson_interval(9, 10)
    >>> round(low, 4), round(high, 4)
    (0.5958, 0.9821)
    """
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(share * (1 - share) / trials + Z95**2 / (4 * trials**2))
    return (max(0.0, centre - half), min(1.0, centre + half))


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that at least one of ``k`` samples, drawn without replacement from ``samples``, succeeds.

    >>> round(pass_at_k(1, 4, 2), 6)  # 1 - C(3,2) / C(4,2)
    0.5
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)
