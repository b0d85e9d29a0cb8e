"""Clipped importance weights on a policy gradient: every token keeps its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Clip, cispo_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import as_settings

RANGE = Clip(1.0, 4.0)


class CISPO(PolicyGradient):
    """Clipped importance-sampling policy optimization (arXiv 2506.13585).

    ::

        A_i  = (r_i - m) / (s + 1e-6)
        loss = reduce_t( -sg(clip(rho_t, 1 - clip.low, 1 + clip.high)) A_i log pi(token_t) + beta KL_t )

    The metrics are those of :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        clip: bounds of the weight; ``low: 1`` has no lower one, as in the paper.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or ``clip.dual``, since ``clip.high`` bounds the weight already.
    """

    smallest_group = 2
    advantage = staticmethod(group_normalized_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        clip: Clip = RANGE,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.clip: Clip = as_settings(Clip, clip, "clip", RANGE)
        if self.clip.dual is not None:
            raise ConfigurationError(
                f"clip.dual is {self.clip.dual}, but clip.high bounds CISPO's weight at all advantages; leave it out"
            )

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return cispo_loss(logp, old_logp, rows.advantages, rows.action_mask, self.clip), {}
