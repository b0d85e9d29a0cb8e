"""REINFORCE++ with the mean of the task's episodes as the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import clip_fraction, ppo_clip_loss
from mrlm_pl.policy import Policy


class REINFORCEPlusPlusBaseline(PolicyGradient):
    """REINFORCE++-baseline (arXiv 2501.03262).

    The returns of a task's episodes less their mean ``m``, whitened over all of a policy's tokens on all ranks::

        A_t  = (r_i - m - mean) / std
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) + beta KL_t )

    ``clip_fraction`` is the share of tokens whose gradient the clip removes; the other numbers are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        clip_low, clip_high: how far the ratio may move before its gradient stops.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, zero_variance="keep", **settings)
        if not 0 < clip_low < 1 or clip_high <= 0:
            raise ConfigurationError(f"clip_low {clip_low} must be between 0 and 1, clip_high {clip_high} above 0")
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        rows = self.group_credit(episodes, sampling, group_centered_advantages)
        self.whiten(rows)
        return rows

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        mask, advantages = rows.action_mask, rows.advantages
        losses = ppo_clip_loss(logp, old_logp, advantages, mask, **self.clip)
        return losses, {"clip_fraction": clip_fraction(logp, old_logp, advantages, mask, **self.clip)}
