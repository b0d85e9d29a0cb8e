"""Multi-agent REINFORCE: every agent learns from the joint return, without a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.decisions import TreeCredit, Weighting, joint_mode_judge
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import policy_gradient_loss
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching


class MAREINFORCE(PolicyGradient):
    """Multi-agent REINFORCE (arXiv 2508.04652).

    For a decision with return ``R`` (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A    = R
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1).

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
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
        joint_mode: Literal["align", "cross"] = "align",
        cross_reduction: CrossReduction = "mean",
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.tree: TreeCredit = TreeCredit(
            Branching(joint_mode, stop_above=stop_above),
            gamma,
            reward,
            joint_mode_judge(joint_mode, cross_reduction),
            weighting,
            reduction=self.reduction,
        )

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        returns = self.tree.returns(episodes, self.turn_bonus(sampling))
        advantages = returns.reward
        return self.tree.rows(self, returns, advantages, self.temperatures(sampling))

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}
