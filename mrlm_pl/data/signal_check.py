"""A warning for a run whose collections carry no learning signal."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mrlm_pl.data.collection import Returns
from mrlm_pl.engines import Sampling

logger = logging.getLogger(__name__)

_ITERATIONS = 3
"""Iterations in a row without a signal before the warning."""


class SignalCheck:
    """Counts iterations in which no group differs in its returns, or every turn is truncated, and warns of the cause.

    Args:
        sampling: how training episodes are sampled.
        compares: whether the algorithm compares the episodes of a task; otherwise the same returns in all episodes
            of these iterations, agent by agent, are what carries no signal.
    """

    def __init__(self, sampling: Sampling, compares: bool) -> None:
        self.sampling, self.compares = sampling, compares
        self._flat = self._truncated = 0
        self._returns: frozenset[Returns] = frozenset()

    def see(self, metrics: Mapping[str, float], returns: frozenset[Returns]) -> None:
        """Look at an iteration.

        Args:
            metrics: what is logged of it.
            returns: of the agents in its episodes, on all ranks.
        """
        before, self._returns = self._returns, returns
        if self.compares:
            flat = metrics.get("rollout/zero_variance_groups") == 1.0
        else:
            flat = len(returns) == 1
            self._flat *= before == returns
        truncated = metrics.get("rollout/truncated_turns") == 1.0
        self._flat = self._flat + 1 if flat else 0
        self._truncated = self._truncated + 1 if truncated else 0
        if self._flat == _ITERATIONS:
            logger.warning(
                "%d iterations in a row have no learning signal: %s. Likely cause: %s",
                _ITERATIONS,
                "all returns within each group are equal" if self.compares else "all rewards are equal",
                self._cause(metrics, truncated),
            )
        elif self._truncated == _ITERATIONS:
            logger.warning(
                "every turn of %d iterations in a row is truncated at data.sampling.max_tokens %d; raise it, or check "
                "that the model's chat template ends a reply with its end-of-sequence token",
                _ITERATIONS,
                self.sampling.max_tokens,
            )

    def _cause(self, metrics: Mapping[str, float], truncated: bool) -> str:
        if self.sampling.temperature == 0:
            return "data.sampling.temperature is 0, so all episodes of a task are the same; set it to 1"
        if truncated:
            return (
                f"every turn is truncated at data.sampling.max_tokens {self.sampling.max_tokens}, before an answer; "
                "raise it"
            )
        if metrics.get("rollout/success") == 1.0:
            return "every episode succeeds; use harder tasks"
        if metrics.get("rollout/success") == 0.0 or not any(value for episode in self._returns for _, value in episode):
            return (
                "no episode earns anything: the tasks are too hard for the model, or its replies are not in the form "
                "that the environment reads; look at RUN/episodes, or `mrlm eval` with a few episodes"
            )
        return "the reward does not depend on the reply; look at RUN/episodes"
