"""Multi-agent REINFORCE leave-one-out: the joint return against the mean of the other decisions in the same state."""

from __future__ import annotations

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.learner.joint_actions import ComparedJointActions
from mrlm_pl.learner.policy_gradient import PolicyGradient


class MARLOO(ComparedJointActions, PolicyGradient):
    """Multi-agent REINFORCE leave-one-out (arXiv 2508.04652).

    For the G decisions of an agent in a state, with returns ``R_g``
    (see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`)::

        A_g  = R_g - mean of the others = G / (G - 1) (R_g - mean(R))
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
    advantage = staticmethod(leave_one_out_advantages)
