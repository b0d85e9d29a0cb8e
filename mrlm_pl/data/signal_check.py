"""A warning for a run whose collections carry no learning signal."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode

logger = logging.getLogger(__name__)

_ITERATIONS = 3
"""Iterations in a row without a signal before the warning."""


class SignalCheck:
    """Counts iterations in which no group differs in its returns, or every turn is truncated, and warns of the cause.

    Args:
        sampling: how training episodes are sampled.
        compares: whether the algorithm compares the episodes of a task; otherwise equal rewards of a whole iteration
            are what carries no signal.
    """

    def __init__(self, sampling: Sampling, compares: bool) -> None:
        self.sampling, self.compares = sampling, compares
        self._flat = self._truncated = 0

    def see(self, metrics: Mapping[str, float], episodes: Sequence[Episode]) -> None:
        """Look at an iteration: its logged metrics and this rank's episodes."""
        rewards = {episode.reward for episode in episodes if not episode.failed}
        flat = metrics.get("rollout/zero_variance_groups") == 1.0 if self.compares else len(rewards) == 1
        truncated = metrics.get("rollout/truncated_turns") == 1.0
        self._flat = self._flat + 1 if flat else 0
        self._truncated = self._truncated + 1 if truncated else 0
        if self._flat == _ITERATIONS:
            logger.warning(
                "%d iterations in a row have no learning signal: %s. Likely cause: %s",
                _ITERATIONS,
                "all returns within each group are equal" if self.compares else "all rewards are equal",
                self._cause(metrics, rewards, truncated),
            )
        elif self._truncated == _ITERATIONS:
            logger.warning(
                "every turn of %d iterations in a row is truncated at data.sampling.max_tokens %d; raise it, or check "
                "that the model's chat template ends a reply with its end-of-sequence token",
                _ITERATIONS,
                self.sampling.max_tokens,
            )

    def _cause(self, metrics: Mapping[str, float], rewards: set[float], truncated: bool) -> str:
        if self.sampling.temperature == 0:
            return "data.sampling.temperature is 0, so all episodes of a task are the same; set it to 1"
        if truncated:
            return (
                f"every turn is truncated at data.sampling.max_tokens {self.sampling.max_tokens}, before an answer; "
                "raise it"
            )
        if metrics.get("rollout/success") == 1.0:
            return "every episode succeeds; use harder tasks"
        if metrics.get("rollout/success") == 0.0 or rewards == {0.0}:
            return (
                "no episode earns anything: the tasks are too hard for the model, or its replies are not in the form "
                "that the environment reads; look at RUN/episodes, or `mrlm eval` with a few episodes"
            )
        return "the reward does not depend on the reply; look at RUN/episodes"
