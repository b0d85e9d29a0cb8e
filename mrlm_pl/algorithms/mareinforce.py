"""Multi-agent REINFORCE: every agent learns from the joint return, without a baseline."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.learner.credit.decisions import DecisionReturns, JointMode, TreeCredit, Weighting
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare


class MAREINFORCE(PolicyGradient):
    """Multi-agent REINFORCE (arXiv 2508.04652).

    For a decision with return ``R`` (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A    = R
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1).

    Args:
        joint_mode, cross_reduction, gamma, stop_above, reward, weighting: see
            :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        joint_mode: JointMode = "align",
        cross_reduction: CrossReduction = "mean",
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TreeCredit(joint_mode, cross_reduction, gamma, stop_above, reward, weighting)

    def advantages(self, returns: DecisionReturns) -> Tensor:
        return returns.reward
