"""REINFORCE++: discounted, KL-penalized returns, whitened over the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.turns import DiscountUnit, discounts_of, rewarded_rows
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import clip_fraction, kl_k1, ppo_clip_loss
from mrlm_pl.policy import Policy


class REINFORCEPlusPlus(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262).

    The return of each token, with the divergence from the reference charged to every token, whitened over all of a
    policy's tokens on all ranks::

        R_t  = sum over s >= t of gamma^(s - t) (r_s - beta (log pi_old - log pi_ref)_s)
        A_t  = (R_t - mean) / std
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) )

    ``pi_old`` is the policy that sampled, as ``recompute_old_logp`` says. A turn's reward is on its last token; text
    of the environment carries the return through.

    ``clip_fraction`` is the share of tokens whose gradient the clip removes; the other numbers are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        gamma: discount factor.
        discount_unit: ``token`` discounts from token to token, as in the paper, ``turn`` from turn to turn.
        kl_coefficient: ``beta``; 0 skips the reference model altogether.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        gamma: float = 1.0,
        discount_unit: DiscountUnit = "token",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, kl_estimator="k3", zero_variance="keep", **settings)
        if not 0 < clip_low < 1 or clip_high <= 0 or not 0 <= gamma <= 1:
            raise ConfigurationError(
                f"clip_low {clip_low} must be between 0 and 1, clip_high {clip_high} above 0, gamma {gamma} between 0 "
                "and 1"
            )
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}
        if discount_unit not in get_args(DiscountUnit):
            raise ConfigurationError(f"discount_unit is {discount_unit!r}; it must be turn or token")
        self.gamma, self.discount_unit = gamma, discount_unit

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        bonus = self.turn_bonus(sampling)
        tables = rewarded_rows(episodes, dict.fromkeys(self.policies, sampling.temperature or 1.0), bonus)
        rows = {}
        for name, table in tables.items():
            if not self.policy(name).trained:
                continue
            batch, rewards = table.batch.to(self.device), table.rewards.to(self.device)
            if self.reference.used:
                batch.ref_logp = self.reference.logprobs(self.policy(name), batch, self.trainer)
                if self.recomputes(sampling):
                    batch.proximal_logp = self.policy(name)(**batch.inputs())
                rewards = rewards - self.kl_coefficient * kl_k1(batch.old_logp, batch.ref_logp, batch.action_mask)
            discounts = discounts_of(batch.action_mask, self.gamma, self.discount_unit)
            nothing = torch.zeros_like(rewards)
            # Without values, GAE at lambda 1 is the discounted return.
            batch.advantages, _ = table.advantages(rewards, nothing, discounts, 1.0, nothing[:, 0])
            rows[name] = batch
        self.whiten(rows)
        return rows

    def _reference_losses(self, logp: Tensor, rows: PolicyBatch) -> Tensor:
        return torch.zeros_like(logp)  # the divergence is in the reward already

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        mask, advantages = rows.action_mask, rows.advantages
        losses = ppo_clip_loss(logp, old_logp, advantages, mask, **self.clip)
        return losses, {"clip_fraction": clip_fraction(logp, old_logp, advantages, mask, **self.clip)}
