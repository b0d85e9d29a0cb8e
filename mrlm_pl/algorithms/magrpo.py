"""Multi-agent group relative policy optimization: the joint return against the mean in the same state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient


class MAGRPO(JointPolicyGradient):
    """Multi-agent group relative policy optimization (arXiv 2508.04652).

    For the G decisions of an agent in a state, with returns ``R_g``
    (see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`)::

        A_g  = R_g - mean(R)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        settings: see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`.
    """

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return group_centered_advantages(returns, labels)
