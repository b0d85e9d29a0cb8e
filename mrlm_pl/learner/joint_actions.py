"""Options of the algorithms that credit joint actions; list them before the policy gradient among the bases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.learner.credit.decisions import JointMode, TreeCredit, Weighting
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.settings import ChecksArguments, UnitInterval


class JointActions(ChecksArguments):
    """Options of the credit of joint actions.

    Args:
        joint_mode, cross_reduction, gamma, stop_above, reward, weighting: see
            :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    unit: Any

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        joint_mode: JointMode = "align",
        cross_reduction: CrossReduction = "mean",
        gamma: UnitInterval = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)  # type: ignore[call-arg] # the policy gradient's
        self.unit = TreeCredit(joint_mode, cross_reduction, gamma, stop_above, reward, weighting)


class ComparedJointActions(JointActions):
    """Options of joint actions whose decisions are compared with each other.

    Args:
        normalize: divide by the standard deviation of the comparison.
        policies, seats, settings: see :class:`JointActions`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        normalize: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = replace(self.unit, normalize=normalize)
