"""95 % intervals: bounds by arithmetic and tables, coverage by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrlm_pl.evaluation.intervals import mean_interval, ratio_interval, share_interval, t_quantile, wilson_interval


@pytest.mark.parametrize(
    ("degrees", "value"),
    [(1, 12.70620), (2, 4.302653), (3, 3.182446), (4, 2.776445), (9, 2.262157), (30, 2.042272), (120, 1.979930)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(degrees: int, value: float) -> None:
    assert t_quantile(degrees) == pytest.approx(value, abs=5e-6)


@pytest.mark.parametrize("solved", [0, 1])
@pytest.mark.parametrize("samples", [1, 8, 64])
def test_samples_of_a_task_that_all_agree_are_worth_one_trial(solved: int, samples: int) -> None:
    assert share_interval([(solved * samples, samples)] * 20) == pytest.approx(wilson_interval(solved * 20, 20))
    assert share_interval([(solved * samples, samples)]) == pytest.approx(wilson_interval(solved, 1))


def test_one_failing_task_does_not_change_what_the_samples_are_worth() -> None:
    low_all, _ = share_interval([(8, 8)] * 20)
    low_one, high_one = share_interval([(8, 8)] * 19 + [(0, 8)])
    assert (low_one, high_one) == pytest.approx(wilson_interval(19, 20))
    assert low_all == pytest.approx(wilson_interval(20, 20)[0])


def test_single_samples_are_independent_trials() -> None:
    assert share_interval([(1, 1)] * 3 + [(0, 1)] * 7) == pytest.approx(wilson_interval(3, 10))


def test_samples_that_differ_within_tasks_are_worth_more_than_the_tasks() -> None:
    """With half of each task's samples right there is no spread between the tasks."""
    low, high = share_interval([(32, 64)] * 40)
    narrow, wide = wilson_interval(40 * 32, 40 * 64), wilson_interval(20, 40)
    assert narrow[1] - narrow[0] <= high - low < (wide[1] - wide[0]) / 2


def test_a_cluster_without_a_case_does_not_count() -> None:
    tasks = [(8, 9), (3, 9), (5, 9), (6, 9)]
    assert share_interval([*tasks, (0, 0)]) == share_interval(tasks)
    assert ratio_interval([(2.0, 1), (0, 0), (1.0, 3)]) == ratio_interval([(2.0, 1), (1.0, 3)])


def test_intervals_stay_within_the_possible() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = rng.integers(1, 9, rng.integers(1, 12))
        groups = [(float(rng.integers(0, size + 1)), float(size)) for size in sizes]
        share = sum(value for value, _ in groups) / sum(size for _, size in groups)
        low, high = share_interval(groups)
        assert 0 <= low <= share <= high <= 1
        assert high > low
        low, high = ratio_interval(groups, 0.0, 1.0)
        assert 0 <= low <= share <= high <= 1
        assert high > low


def test_a_mean_without_spread_has_the_bounds_that_unseen_values_leave() -> None:
    unseen = 3.841459 / (20 + 3.841459)  # Wilson's upper bound for 0 of 20: z^2 / (n + z^2)
    assert mean_interval([[0.0]] * 20, -1.0, 1.0) == pytest.approx((-unseen, unseen), abs=1e-6)
    assert mean_interval([[2.0, 2.0]] * 20, 0.0, 3.0) == pytest.approx((2 - 2 * unseen, 2 + unseen), abs=1e-6)
    assert mean_interval([[0.1]] * 20) == (-math.inf, math.inf), "without bounds nothing is known"
    assert mean_interval([[0.3, 0.9]], 0.0, 1.0) == (0.0, 1.0), "nor of one task"


def coverage(share: float, tasks: int, samples: int, correlation: float, rounds: int) -> float:
    """Proportion of simulated evaluations (beta-binomial) whose interval holds the true share."""
    rng = np.random.default_rng(0)
    if correlation == 1:
        chances = (rng.random((rounds, tasks)) < share).astype(float)
    else:
        scale = (1 - correlation) / correlation
        chances = rng.beta(share * scale, (1 - share) * scale, (rounds, tasks))
    counts = rng.binomial(samples, chances)
    intervals = [share_interval([(int(count), samples) for count in row]) for row in counts]
    return sum(low - 1e-12 <= share <= high + 1e-12 for low, high in intervals) / rounds


@pytest.mark.parametrize(
    ("share", "tasks", "samples", "correlation"),
    [(0.95, 20, 8, 1.0), (0.97, 32, 8, 1.0), (0.99, 64, 16, 1.0), (0.97, 32, 4, 0.5)],
)
def test_coverage_of_a_few_correlated_tasks(share: float, tasks: int, samples: int, correlation: float) -> None:
    """Samples as independent trials where none fails gives 0.55, 0.56, 0.45 and 0.82 here."""
    assert coverage(share, tasks, samples, correlation, 400) > 0.9
