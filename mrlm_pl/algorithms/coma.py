"""Counterfactual credit: each agent's decision against what its own other decisions would have earned."""

from __future__ import annotations

from typing import Any

from mrlm_pl.learner.credit.decisions import TreeCredit, Weighting
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.settings import UnitInterval


class COMA(PolicyGradient):
    """Counterfactual multi-agent policy gradients (arXiv 1705.08926) with sampled decisions instead of a critic.

    The g-th decisions of all agents make a joint action with return ``R_g``. For each agent it is compared with the
    joint actions in which only that agent's decision is replaced by its others, which are judged as well::

        A_g  = R_g - mean over i of R(g, with this agent's decision i)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    With two agents that is G^2 joint actions in every state, with N > 2 agents ``G + N G (G - 1)``.

    Args:
        gamma, stop_above, reward, weighting: see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        gamma: UnitInterval = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TreeCredit(
            gamma=gamma, stop_above=stop_above, reward=reward, weighting=weighting, counterfactual=True
        )
