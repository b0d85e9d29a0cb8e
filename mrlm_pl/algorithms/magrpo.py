"""Multi-agent group relative policy optimization: the joint return against the mean in the same state."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.learner.credit.decisions import JointMode, TreeCredit, Weighting
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare


class MAGRPO(PolicyGradient):
    """Multi-agent group relative policy optimization (arXiv 2508.04652).

    For the G decisions of an agent in a state, with returns ``R_g``
    (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A_g  = R_g - mean(R)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1).

    Args:
        joint_mode, cross_reduction, gamma, stop_above, reward, weighting, normalize: see
            :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2
    advantage = staticmethod(group_centered_advantages)

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
        normalize: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TreeCredit(joint_mode, cross_reduction, gamma, stop_above, reward, weighting, normalize)
