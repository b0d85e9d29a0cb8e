"""Multi-agent REINFORCE: every agent learns from the joint return, without a baseline."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.learner.credit.decisions import DecisionReturns
from mrlm_pl.learner.joint_actions import JointActions
from mrlm_pl.learner.policy_gradient import PolicyGradient


class MAREINFORCE(JointActions, PolicyGradient):
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

    def advantages(self, returns: DecisionReturns) -> Tensor:
        return returns.reward
