"""95 % intervals of shares and means whose values are clustered: the samples of one task depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

Z95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""

PRIOR_CLUSTERS = 0.25
"""Weight of one solved and one unsolved cluster in the estimate of a share's design effect."""


def share_interval(groups: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the 95 % interval of a share in [0, 1] whose trials are clustered.

    Wilson's score interval (1927) with an effective number of trials, as Dean and Pagano (2015) recommend for clustered
    samples: the trials divided by their design effect, corrected for its few degrees of freedom by Student's t. The
    result is never above the number of trials, and never below Kish's effective number of clusters, at which the trials
    of a cluster all agree. The design effect is estimated with a quarter of a solved and of an unsolved cluster added:
    a sample without a failure shows no spread, and proves no independence. Coverage by simulation:
    ``benchmarks/results/interval_coverage.json``.

    Args:
        groups: (successes, trials) of each cluster, with ``0 <= successes <= trials``; draws may count one half.

    >>> [round(bound, 3) for bound in share_interval([(1, 1)] * 20)]    # 20 tasks, all solved
    [0.839, 1.0]
    >>> [round(bound, 3) for bound in share_interval([(8, 8)] * 20)]    # ... in all of 8 samples: still 20 tasks
    [0.839, 1.0]
    """
    sizes = [trials for _, trials in groups if trials]
    trials, squared_sizes = math.fsum(sizes), math.fsum(size**2 for size in sizes)
    share = math.fsum(value for value, _ in groups) / trials
    clusters, size = trials**2 / squared_sizes, squared_sizes / trials
    prior = PRIOR_CLUSTERS * size
    smoothed = (share * trials + prior) / (trials + 2 * prior)
    squares = math.fsum((value - smoothed * count) ** 2 for value, count in groups)
    squares += PRIOR_CLUSTERS * size**2 * (smoothed**2 + (1 - smoothed) ** 2)
    counted = len(sizes) + 2 * PRIOR_CLUSTERS
    variance = counted / (counted - 1) * squares / (trials + 2 * prior) ** 2
    effect = variance * (trials + 2 * prior) / (smoothed * (1 - smoothed))
    correction = (Z95 / t_quantile(len(sizes) - 1)) ** 2 if len(sizes) > 1 else 0.0
    effective = max(clusters, min(trials, trials / effect * correction))
    return wilson_interval(share * effective, effective)


def mean_interval(
    groups: Sequence[Sequence[float]], low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """Return the 95 % interval of the mean of all values, given in clusters; see :func:`ratio_interval`.

    >>> [round(bound, 4) for bound in mean_interval([[0.0], [1.0], [1.0], [0.0]])]  # 0.5 +- 3.1824 sqrt((1/3) / 4)
    [-0.4187, 1.4187]
    """
    return ratio_interval([(math.fsum(group), len(group)) for group in groups], low, high)


def ratio_interval(
    sums: Sequence[tuple[float, float]], low: float = -math.inf, high: float = math.inf
) -> tuple[float, float]:
    """Return the 95 % interval of a ratio of two sums over clusters, by Student's t with one degree less than clusters.

    The variance is that of the ratio estimator; with one value in each cluster it is ``s^2 / n``. If all clusters
    have the same mean ``m`` no spread is known: at most a share ``h`` of clusters, Wilson's upper bound for none of
    them, has another one, so that the mean lies within ``m - h (m - low)`` and ``m + h (high - m)``.

    Args:
        sums: (sum of the values, number of values) of each cluster.
        low: least possible value.
        high: largest possible value.

    >>> ratio_interval([(0, 1), (2, 2)], low=0.0, high=1.0)
    (0.0, 1.0)
    >>> [round(bound, 3) for bound in ratio_interval([(5, 5)] * 20, low=0.0, high=1.0)]
    [0.839, 1.0]
    """
    clusters_with_values = [(value, count) for value, count in sums if count]
    total = math.fsum(count for _, count in clusters_with_values)
    mean = math.fsum(value for value, _ in clusters_with_values) / total
    clusters = len(clusters_with_values)
    if clusters < 2:
        return (low, high)
    if all(math.isclose(value, mean * count, abs_tol=1e-12) for value, count in clusters_with_values):
        unseen = wilson_interval(0, clusters)[1]
        return (mean - unseen * (mean - low), mean + unseen * (high - mean))
    squares = math.fsum((value - mean * count) ** 2 for value, count in clusters_with_values)
    half = t_quantile(clusters - 1) * math.sqrt(clusters / (clusters - 1) * squares) / total
    return (max(low, mean - half), min(high, mean + half))


def difference_interval(
    one: tuple[float, tuple[float, float]], other: tuple[float, tuple[float, float]]
) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent estimates, each given with its own interval.

    Source: R. G. Newcombe, "Interval estimation for the difference between independent proportions" (1998), method 10.

    >>> # 0.4 - hypot(0.3, 0.3) and 0.4 + hypot(0.1, 0.3)
    >>> [round(bound, 4) for bound in difference_interval((0.9, (0.6, 1.0)), (0.5, (0.2, 0.8)))]
    [-0.0243, 0.7162]
    """
    (first, (low, high)), (second, (other_low, other_high)) = one, other
    below, above = math.hypot(first - low, other_high - second), math.hypot(high - first, second - other_low)
    return first - second - below, first - second + above


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share of independent trials (Wilson 1927).

    >>> low, high = wilson_interval(9, 10)
    >>> round(low, 4), round(high, 4)
    (0.5958, 0.9821)
    """
    share = successes / trials
    scale = 1 + Z95**2 / trials
    centre = (share + Z95**2 / (2 * trials)) / scale
    half = Z95 / scale * math.sqrt(max(0.0, share * (1 - share)) / trials + Z95**2 / (4 * trials**2))
    return (max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


@lru_cache(maxsize=1024)
def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, by bisection of its distribution function in closed form.

    The function is that of Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Args:
        degrees: degrees of freedom, 1 or more.

    >>> [round(t_quantile(degrees), 3) for degrees in (1, 2, 3, 10, 100)]  # tables
    [12.706, 4.303, 3.182, 2.228, 1.984]
    """
    low, high = Z95, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_inside(middle, degrees) < 0.95 else (low, middle)
    return low


def _t_inside(bound: float, degrees: int) -> float:
    """Return the probability that Student's t lies within ``-bound`` and ``bound``."""
    angle = math.atan(bound / math.sqrt(degrees))
    odd, sine, cosine = degrees % 2, math.sin(angle), math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for number in range(1, (degrees - odd) // 2 + 1):
        total += term
        term *= cosine**2 * (2 * number - 1 + odd) / (2 * number + odd)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples, drawn without replacement from ``samples``, succeeds.

    >>> round(pass_at_k(1, 4, 2), 6)  # 1 - C(3,2) / C(4,2)
    0.5
    """
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def with_interval(value: float | None, bounds: tuple[float | None, float | None] | None) -> str:
    """Return a mean and its interval, where one is known, as a cell of a table; a dash for no mean.

    >>> with_interval(0.25, (0.125, 0.375)), with_interval(-1e-17, (None, None)), with_interval(None, None)
    ('0.250 [0.125, 0.375]', '0.000', '-')
    """
    if value is None:
        return "-"
    finite = [bound for bound in bounds or () if bound is not None and math.isfinite(bound)]
    return f"{value:z.3f} [{finite[0]:z.3f}, {finite[1]:z.3f}]" if len(finite) == 2 else f"{value:z.3f}"
