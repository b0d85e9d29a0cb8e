"""Multi-agent REINFORCE: every agent learns from the joint return, without a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient
from mrlm_pl.policy import Policy


class MAREINFORCE(JointPolicyGradient):
    """Multi-agent REINFORCE (arXiv 2508.04652).

    For a decision with return ``R`` (see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`)::

        A    = R
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        settings: see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`, without ``normalize``.

    Raises:
        ConfigurationError: ``normalize`` is asked for, which would subtract nothing and still divide.
    """

    smallest_group = 1

    def __init__(
        self, policies: dict[str, Policy] | None = None, seats: dict[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(policies, seats, **settings)
        if self.normalize:
            raise ConfigurationError("normalize is true, but MAREINFORCE has no baseline to centre by; use MAGRPO")

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return returns
