"""Group sequence policy optimization: the ratio of whole answers instead of tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import Clip, Reduction, clip_fraction, gspo_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import as_settings

RANGE = Clip(3e-4, 4e-4)


class GSPO(PolicyGradient):
    """Group sequence policy optimization (arXiv 2507.18071).

    ``s_i`` is the geometric mean of an answer's token ratios; its gradient flows through each token's own::

        A_i  = (r_i - m) / (s + 1e-6)
        s_i  = exp(mean_t log rho_t)
        loss = reduce_t( -min(s_i A_i, clip(s_i, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    The reduction is ``sequence_mean``, as the objective is about answers. ``clip_fraction`` is the share of tokens
    whose answer is clipped; the other numbers are those of :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        clip: range in which ``s_i`` has a gradient, much narrower than a token's; see :class:`mrlm_pl.losses.Clip`.
        reduction, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    advantage = staticmethod(group_normalized_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        clip: Clip = RANGE,
        reduction: Reduction = "sequence_mean",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, reduction=reduction, **settings)
        self.clip: Clip = as_settings(Clip, clip, "clip", RANGE)

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        mask, advantages = rows.action_mask, rows.advantages
        losses = gspo_loss(logp, old_logp, advantages, mask, self.clip)
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        # The mean log-ratio of the answer on every token, so that each counts as clipped or not with its answer.
        mean = ((logp - old_logp).masked_fill(~mask, 0.0).sum(-1, keepdim=True) / lengths).expand_as(logp)
        clipped = clip_fraction(mean, mean.new_zeros(mean.shape), advantages, mask, self.clip)
        return losses, {"clip_fraction": clipped}
