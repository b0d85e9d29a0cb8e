"""Multi-agent group relative policy optimization: the joint return against the mean in the same state."""

from __future__ import annotations

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.learner.joint_actions import ComparedJointActions
from mrlm_pl.learner.policy_gradient import PolicyGradient


class MAGRPO(ComparedJointActions, PolicyGradient):
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
