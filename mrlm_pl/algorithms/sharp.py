"""SHARP: the team's return, an agent's marginal contribution and its process reward, normalized for each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.episode import Episode
from mrlm_pl.learner.credit.marginal import Absence, Coalitions
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.credit.rules import warn_of_absent_components
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.rollout.replay import Rest
from mrlm_pl.settings import NonNegativeFloat, not_all_zero


class SHARP(PolicyGradient):
    """SHARP (arXiv 2602.08335).

    With the team's return ``R(S)`` when the agents ``S`` decide as in the episode and the others are absent, and the
    sums ``c_ik`` of an agent's reward components k::

        r_i  = team_weight R(all) + marginal_weight (R(all) - R(all without i)) + sum_k process[k] c_ik
        A_i  = (r_i - m_i) / (s_i + 1e-6)         m_i, s_i over the task's episodes
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    Each episode is replayed once without each agent; see :class:`~mrlm_pl.learner.credit.marginal.Coalitions`, and
    :class:`~mrlm_pl.algorithms.ccpo.CCPO` for the bias where agents react to each other.

    Args:
        team_weight: weight of the team's return, equal for all agents.
        marginal_weight: weight of the agent's marginal contribution.
        process: weight of the agent's own reward components by name, such as those of its tool calls, 0 if not named; a
            name that a rollout lacks causes a warning.
        absent, rest: messages of an absent agent, decisions of the others after its first; see
            :data:`mrlm_pl.learner.credit.marginal.Absence`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name, a value out of range, or all weights are 0.
    """

    smallest_group = 2
    default_loss = "ppo"
    advantage = staticmethod(group_normalized_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        team_weight: NonNegativeFloat = 1.0,
        marginal_weight: NonNegativeFloat = 1.0,
        process: Mapping[str, float] | None = None,
        absent: Absence = "empty",
        rest: Rest = "replay",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        not_all_zero("SHARP: ", team_weight=team_weight, marginal_weight=marginal_weight, process=process or {})
        self.team_weight, self.marginal_weight, self.process = team_weight, marginal_weight, dict(process or {})
        self.unit = Coalitions("marginal", absent=absent, rest=rest)

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> Returns:
        """Return the weighted rewards, with the bonuses of turns, instead of the contributions."""
        returns = super().returns(episodes, bonus, greedy)
        team = torch.tensor([episode.reward for episode in returns.episode], dtype=torch.float64)
        contributed = returns.reward - returns.bonus
        reward = returns.bonus + self.team_weight * team + self.marginal_weight * contributed
        for name, sums in returns.components().items():
            reward = reward + self.process.get(name, 0.0) * sums
        return replace(returns, reward=reward)

    def with_baselines(self, returns: Returns) -> Returns:
        if self.process:
            warn_of_absent_components(self.trainer, "process", self.process, returns.components(), self.warned)
        return super().with_baselines(returns)
