"""A warning for a run that learns to please its verifier instead of solving its tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.verifier.scorer import VERIFIER_SCORE

WINDOW = 2
"""Iterations of each of the two ends of a run that are compared."""

STANDARD_ERRORS = 2.0
LEAST_CHANGE = 0.05

Measured = Sequence[float]
"""Of one iteration or several: sum of scores, number of scores, sum of successes, number of episodes."""


class VerifierWatch:
    """Compares a verifier's mean score with the accuracy by the tasks' own labels, by environment, over a run.

    The two have parted when, from the first to the latest :data:`WINDOW` iterations, the score has risen and the
    accuracy has fallen, each by more than :data:`STANDARD_ERRORS` standard errors and the score by
    :data:`LEAST_CHANGE` or more. The standard error of a share p of n episodes is sqrt(p (1 - p) / n), which for a mean
    of scores in [0, 1] is an upper bound.
    """

    def __init__(self) -> None:
        self._first: dict[str, list[list[float]]] = {}
        self._latest: dict[str, list[list[float]]] = {}
        self._warned: list[str] = []

    def see(self, means: Mapping[str, tuple[float, float]]) -> str | None:
        """Return a warning, with a line for each environment that is new in it, or None.

        Args:
            means: sum and count of what is logged of an iteration, by name.
        """
        found: list[str] = []
        for name, (total, count) in means.items():
            environment = name.removeprefix("rollout/").removesuffix(f"/{VERIFIER_SCORE}")
            right = means.get(f"rollout/{environment}/accuracy")
            if name != f"rollout/{environment}/{VERIFIER_SCORE}" or right is None:
                continue
            first = self._first.setdefault(environment, [])
            latest = self._latest.setdefault(environment, [])
            (first if len(first) < WINDOW else latest).append([total, count, *right])
            del latest[:-WINDOW]
            if len(latest) < WINDOW or environment in self._warned:
                continue
            before, after = _pooled(first), _pooled(latest)
            if have_parted(before, after):
                self._warned.append(environment)
                found.append(
                    f"{environment}: the verifier's score has risen from {before[0] / before[1]:.3f} to "
                    f"{after[0] / after[1]:.3f} while the accuracy has fallen from {before[2] / before[3]:.3f} to "
                    f"{after[2] / after[3]:.3f}: the policy learns to please the verifier. Stop the run at its best "
                    "accuracy; train the verifier on answers of this policy, or raise model.kl_coefficient"
                )
        return "\n".join(found) or None

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"first": self._first, "latest": self._latest, "warned": self._warned}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take over what :meth:`state` gave; None, of an earlier release, begins anew."""
        if state is not None:
            self._first, self._latest, self._warned = state["first"], state["latest"], state["warned"]


def have_parted(before: Measured, after: Measured) -> bool:
    """Whether the score has risen and the accuracy has fallen, beyond chance.

    >>> have_parted((24, 100, 7, 100), (72, 100, 0, 100)), have_parted((24, 100, 7, 100), (72, 100, 7, 100))
    (True, False)
    """
    rise, fall = _change(before[:2], after[:2]), _change(after[2:], before[2:])
    return rise[0] >= LEAST_CHANGE and all(change > STANDARD_ERRORS * error for change, error in (rise, fall))


def _change(before: Measured, after: Measured) -> tuple[float, float]:
    """The difference of two means of values in [0, 1], and its standard error."""
    shares = [(total / count, count) for total, count in (before, after)]
    error = math.sqrt(sum(max(share * (1 - share), 0.0) / count for share, count in shares))
    return shares[1][0] - shares[0][0], error


def _pooled(iterations: Sequence[Measured]) -> list[float]:
    return [math.fsum(column) for column in zip(*iterations, strict=True)]
