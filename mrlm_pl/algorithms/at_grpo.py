"""Agent- and turn-wise group relative policy optimization."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.learner.credit.decisions import TreeCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare


class ATGRPO(PolicyGradient):
    """Agent- and turn-wise group relative policy optimization (AT-GRPO, arXiv 2510.11062).

    In every state each agent is asked for G decisions; their joint actions are judged, and the best one alone is played
    on. Within the key (task, state, agent), for the reward ``r_g`` of that turn::

        A_g  = (r_g - mean(r)) / (std(r) + 1e-6)
        loss = reduce_t( -min(rho_t A_g, clip(rho_t, 1 - clip.low, 1 + clip.high) A_g) + beta KL_t )

    The best is the one with the highest mean over the agents among those that do not end the episode. Later
    rewards do not count, as they are known for the best one only. ``clip_fraction`` is logged as well.

    Args:
        reward: ``team`` is the mean over the agents, ``own`` each agent's own.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2
    advantage = staticmethod(group_normalized_advantages)
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        reward: RewardShare = "team",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TreeCredit(gamma=0.0, reward=reward, weighting="equal", expand="best")
