"""Clipped importance weights on a policy gradient: every token keeps its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import cispo_loss
from mrlm_pl.policy import Policy


class CISPO(PolicyGradient):
    """Clipped importance-sampling policy optimization (arXiv 2506.13585).

    ::

        A_i  = (r_i - m) / (s + 1e-6)
        loss = reduce_t( -sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_i log pi(token_t) + beta KL_t )

    What is logged is described at :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        clip_low, clip_high: bounds of the weight; ``clip_low: 1`` has no lower one, as in the paper.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        clip_low: float = 1.0,
        clip_high: float = 4.0,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if not 0 < clip_low <= 1 or clip_high <= 0:
            raise ConfigurationError(
                f"clip_low {clip_low} must be above 0 and at most 1, clip_high {clip_high} above 0"
            )
        self.clip = {"clip_low": clip_low, "clip_high": clip_high}

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        return self.group_credit(episodes, sampling, group_normalized_advantages)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return cispo_loss(logp, old_logp, rows.advantages, rows.action_mask, **self.clip), {}
