"""Multi-agent ReMax: the joint return against that of the greedy joint rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import group_max_advantages
from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.decisions import TreeCredit, Weighting, joint_mode_judge
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import merged
from mrlm_pl.losses import policy_gradient_loss
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching

logger = logging.getLogger(__name__)


class MAREMAX(PolicyGradient):
    """Multi-agent ReMax (arXiv 2508.04652, 2310.10505).

    Each task is played once more, with the most probable token of every agent at every step; that episode is not
    trained on. For a decision of turn t with return ``R``
    (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A    = R - n (return of the greedy episode from turn t on; 0 where it was over)
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    ``n`` is 1, or with ``cross_reduction: sum`` the number of joint actions that ``R`` is the sum over.

    Groups whose greedy episode failed are left out, and counted once a rollout as ``train/missing_baselines``.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        baseline: ``greedy``; or ``group_max``, minus the highest return in the same state, for comparison with
            implementations that call this ReMax: it depends on the decisions that it judges, which biases the gradient.
        joint_mode: ``align`` combines the g-th decisions of the agents; ``cross`` evaluates the full product of joint
            actions: lower variance, G^N evaluations.
        cross_reduction: ``mean``, or ``sum`` of the joint actions that contain a decision.
        gamma, reward, weighting: see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; null never does.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    uses_importance_ratio = False

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        baseline: Literal["greedy", "group_max"] = "greedy",
        joint_mode: Literal["align", "cross"] = "align",
        cross_reduction: CrossReduction = "mean",
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if baseline not in ("greedy", "group_max"):
            raise ConfigurationError(f"baseline is {baseline!r}; choose from greedy, group_max")
        self.baseline = baseline
        self.tree: TreeCredit = TreeCredit(
            Branching(joint_mode, stop_above=stop_above),
            gamma,
            reward,
            joint_mode_judge(joint_mode, cross_reduction),
            weighting,
            reduction=self.reduction,
        )

    @property
    def uses_greedy_baseline(self) -> bool:
        return self.baseline == "greedy"

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        bonus = self.turn_bonus(sampling)
        if self.baseline == "group_max":
            returns = self.tree.returns(episodes, bonus)
            advantages = group_max_advantages(returns.reward, returns.comparison)
        else:
            played = {episode.group: episode for episode in greedy if not episode.failed}
            missing = {episode.group for episode in episodes} - played.keys()
            if missing:
                logger.warning("%d groups are left out, as their greedy episode failed", len(missing))
            left_out = merged(self.trainer, {"missing": len(missing)})["missing"]
            self.metrics.rollout["train/missing_baselines"] = float(left_out)
            returns = self.tree.returns([episode for episode in episodes if episode.group in played], bonus)
            baselines = [
                decision.summed * self._greedy_return(played[decision.group], decision)
                + _greedy_bonus(played[decision.group], decision, bonus)
                for decision in returns.decisions
            ]
            advantages = returns.reward - torch.tensor(baselines, dtype=torch.float64)
        return self.tree.rows(self, returns, advantages, self.temperatures(sampling))

    def _greedy_return(self, episode: Episode, decision: Decision) -> float:
        """Return the greedy episode's return from the decision's turn on, as the decision's return counts."""
        total = 0.0
        for rewards in reversed(episode.step_rewards[decision.depth :]):
            team = self.tree.reward == "team"
            reward = math.fsum(rewards.values()) / episode.team_size if team else rewards.get(decision.agent, 0.0)
            total = reward + self.tree.gamma * total
        return total

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}


def _greedy_bonus(episode: Episode, decision: Decision, bonus: Callable[[Turn], float] | None) -> float:
    """Return the bonus of the greedy episode's turn at the decision's step."""
    if bonus is None:
        return 0.0
    rows = episode.trajectories.get(decision.agent, ())
    return math.fsum(bonus(turn) for row in rows for turn in row.turns if turn.index == decision.depth)
