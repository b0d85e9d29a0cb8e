"""Multi-agent REINFORCE leave-one-out: the joint return against the mean of the other decisions in the same state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient


class MARLOO(JointPolicyGradient):
    """Multi-agent REINFORCE leave-one-out (arXiv 2508.04652).

    For the G decisions of an agent in a state, with returns ``R_g``
    (see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`)::

        A_g  = R_g - mean of the others = G / (G - 1) (R_g - mean(R))
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        settings: see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`.
    """

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return leave_one_out_advantages(returns, labels)
