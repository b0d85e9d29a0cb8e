"""Independent proximal policy optimization: every agent learns with a value of its own history alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from mrlm_pl.advantages.task_normalization import TaskNormalization
from mrlm_pl.episode import Episode
from mrlm_pl.learner.credit.team import warn_of_constant_sum, with_team_rewards
from mrlm_pl.learner.credit.tokens import DiscountUnit, TokenCredit
from mrlm_pl.learner.critics import AgentCritics, PolicyCritics
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, UnitInterval


class IPPO(PolicyGradient):
    """Independent PPO (arXiv 2011.09533): token-level PPO for each agent, ``V_i`` a function of its own history alone.

    With one policy for each agent and ``reward: own`` it is :class:`~mrlm_pl.algorithms.ppo.PPO`, which already treats
    each agent's trajectories separately. For agents that share a policy or a goal it adds:

    * ``agent_critics``, one for each agent, even if agents share a policy: roles that see or earn different things
      do not share a value. Each critic reads its agent's tokens, learns from that agent's trajectories alone, and is
      not updated when there are none. Its loss is the mean over them; ``value_coefficient`` does not apply to it.
    * advantages whitened per agent, so that none outweighs the others by the scale of its rewards.
    * ``reward: team``: the reward of each turn is the mean over the agents of all rewards from then until its agent's
      next turn.

    For each critic ``train/AGENT/critic/value_loss``, ``grad_norm`` and ``grad_norm_value`` are logged; the other
    numbers are those of :class:`~mrlm_pl.algorithms.ppo.PPO`.

    Args:
        agent_critics: models that estimate the values, for all agents with a trained policy, each with its agent's
            tokenizer; None gives each policy a value head, shared by its agents.
        reward: an agent's ``own`` rewards, or the mean over the ``team``.
        whiten_over: unit within which advantages are whitened: each ``agent`` or each ``policy``.
        value_learning_rate, value_clip, value_coefficient, normalize_values: see :class:`~mrlm_pl.algorithms.ppo.PPO`.
        gamma, discount_unit, lam, whiten_advantages, task_normalization: see
            :class:`~mrlm_pl.algorithms.ppo.PPO`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or critics that do not fit the agents.
    """

    kl_placements = ("reward", "loss")
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        agent_critics: dict[str, Policy] | None = None,
        reward: RewardShare = "own",
        whiten_over: Literal["agent", "policy"] = "agent",
        value_learning_rate: NonNegativeFloat | None = None,
        value_clip: PositiveFloat | None = 0.2,
        value_coefficient: NonNegativeFloat = 0.5,
        normalize_values: bool = False,
        gamma: UnitInterval = 1.0,
        discount_unit: DiscountUnit = "turn",
        lam: UnitInterval = 0.95,
        whiten_advantages: bool = True,
        task_normalization: TaskNormalization | None = "none",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, task_normalization=task_normalization, **settings)
        self.reward = reward
        self.unit = TokenCredit(gamma, lam, discount_unit, whiten_over if whiten_advantages else None)
        critics = AgentCritics if agent_critics else PolicyCritics
        values = value_learning_rate, value_clip, value_coefficient, normalize_values
        self.critic = critics(agent_critics or {}, self.learners, *values)

    def rewarded(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        if self.reward == "own":
            return episodes
        warn_of_constant_sum(episodes, "set `model.reward: own`", self.warned)
        return [with_team_rewards(episode) for episode in episodes]
