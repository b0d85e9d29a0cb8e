"""Multi-agent ReMax: the joint return against that of the greedy joint rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import group_max_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.ranks import merged
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient
from mrlm_pl.policy import Policy

logger = logging.getLogger(__name__)


class MAREMAX(JointPolicyGradient):
    """Multi-agent ReMax (arXiv 2508.04652, 2310.10505).

    Each task is played once more, with the most probable token of every agent at every step; that episode is not
    trained on. For a decision of turn t with return ``R``
    (see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`)::

        A    = R - n (return of the greedy episode from turn t on; 0 where it was over)
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    ``n`` is 1, or with ``cross_reduction: sum`` the number of joint actions that ``R`` is the sum over.

    Groups whose greedy episode failed are left out, and counted once a collection as ``train/missing_baselines``.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        baseline: ``greedy``; or ``group_max``, minus the highest return in the same state, for comparison with
            implementations that call this ReMax: it depends on the decisions that it judges, which biases the gradient.
        settings: see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`.

    Raises:
        ConfigurationError: an unknown name, a value out of range, or ``normalize``.
    """

    smallest_group = 1

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        baseline: Literal["greedy", "group_max"] = "greedy",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if baseline not in ("greedy", "group_max"):
            raise ConfigurationError(f"baseline is {baseline!r}; choose from greedy, group_max")
        if self.normalize:
            raise ConfigurationError("normalize is true, but MAREMAX does not centre by the mean; use MAGRPO")
        self.baseline = baseline
        self._greedy: Mapping[str, Episode] = {}
        self._bonus: Callable[[Turn], float] | None = None

    @property
    def uses_greedy_baseline(self) -> bool:
        return self.baseline == "greedy"

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        if self.baseline == "greedy":
            self._bonus = self.turn_bonus(sampling)
            self._greedy = {episode.group: episode for episode in greedy if not episode.failed}
            groups = {episode.group for episode in episodes}
            missing = groups - self._greedy.keys()
            if missing:
                logger.warning("%d groups are left out, as their greedy episode failed", len(missing))
            left_out = merged(self.trainer, {"missing": len(missing)})["missing"]
            self.metrics.rollout["train/missing_baselines"] = float(left_out)
            episodes = [episode for episode in episodes if episode.group in self._greedy]
        try:
            return super().credit(episodes, sampling, greedy)
        finally:
            self._greedy = {}

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        if self.baseline == "group_max":
            return group_max_advantages(returns, labels)
        baselines = [
            decision.summed * self._greedy_return(decision) + self._greedy_bonus(decision) for decision in decisions
        ]
        return returns - torch.tensor(baselines, dtype=torch.float64)

    def _greedy_bonus(self, decision: Decision) -> float:
        """What the greedy episode's turn at the same step was paid beside its reward, as the decision was."""
        if self._bonus is None:
            return 0.0
        rows = self._greedy[decision.group].trajectories.get(decision.agent, ())
        return math.fsum(self._bonus(turn) for row in rows for turn in row.turns if turn.index == decision.depth)

    def _greedy_return(self, decision: Decision) -> float:
        """What the greedy episode of the group earned from the decision's turn on, as the decision's return counts."""
        episode = self._greedy[decision.group]
        total = 0.0
        for rewards in reversed(episode.step_rewards[decision.depth :]):
            paid = (
                math.fsum(rewards.values()) / episode.team_size
                if self.reward == "team"
                else rewards.get(decision.agent, 0.0)
            )
            total = paid + self.gamma * total
        return total
