"""Agent- and turn-wise group relative policy optimization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient, refuse_settings
from mrlm_pl.losses import clip_fraction, ppo_clip_loss
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching


class ATGRPO(JointPolicyGradient):
    """Agent- and turn-wise group relative policy optimization (AT-GRPO, arXiv 2510.11062).

    In every state each agent is asked for G decisions; their joint actions are judged, and the best one alone is played
    on. Within the key (task, state, agent), for the reward ``r_g`` of that turn::

        A_g  = (r_g - mean(r)) / (std(r) + 1e-6)
        loss = reduce_t( -min(rho_t A_g, clip(rho_t, 1 - clip_low, 1 + clip_high) A_g) + beta KL_t )

    The best is the one with the highest mean over the agents among those that the environment goes on with. What
    follows a decision does not count, as it is known for the best one only. ``clip_fraction`` is logged as well.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        reward: ``team`` is the mean over the agents, ``own`` what each is paid itself.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        dual_clip: bound ``c`` of the loss at negative advantages (1912.09729); None has no bound.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    uses_importance_ratio = True

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        reward: RewardShare = "team",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        **settings: Any,
    ) -> None:
        own = ("joint_mode", "cross_reduction", "gamma", "stop_above", "weighting", "normalize")
        refuse_settings(type(self), settings, own)
        super().__init__(
            policies,
            seats,
            joint_mode="align",
            cross_reduction="mean",
            gamma=0.0,
            stop_above=None,
            reward=reward,
            weighting="equal",
            normalize=False,
            **settings,
        )
        if not 0 < clip_low < 1 or clip_high <= 0 or (dual_clip is not None and dual_clip <= 1):
            raise ConfigurationError(
                f"clip_low {clip_low} must be between 0 and 1, clip_high {clip_high} above 0, dual_clip {dual_clip} "
                "above 1"
            )
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}
        self.dual_clip = dual_clip

    @property
    def turn_tree(self) -> Branching | None:
        return Branching("align", expand="best")

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return group_normalized_advantages(returns, labels)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        mask, advantages = rows.action_mask, rows.advantages
        losses = ppo_clip_loss(logp, old_logp, advantages, mask, dual_clip=self.dual_clip, **self.clip)
        return losses, {"clip_fraction": clip_fraction(logp, old_logp, advantages, mask, **self.clip)}
