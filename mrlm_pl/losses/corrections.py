"""Corrections for data whose sampler ``mu`` is not the policy that the update starts from.

An inference engine's numerics, a quantised engine or a stale weight version make ``mu != pi_old``. The weights here
multiply a token loss. When ``old_logp`` *is* the sampler's recorded log-prob (no recomputation), the PPO ratio already
carries the correction: do not multiply by a weight as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import clamped_exp, masked_log_ratio, masked_values
from mrlm_pl.settings import PositiveFloat, Settings

RatioLevel = Literal["token", "sequence", "geometric_mean"]
"""``token``: each token's ratio; ``sequence``: the product over the row's action tokens, the same for all of them;
``geometric_mean``: that product to the power 1 / number of action tokens."""


@dataclass(frozen=True)
class Correction(Settings):
    """The weight of a token loss for a sampler ``mu`` that is not the policy ``pi_old`` the update starts from.

    Args:
        kind: ``none``; ``plain`` multiplies with ``pi_old / mu`` (decoupled PPO, arXiv 2505.24298); ``truncated`` with
            ``min(pi_old / mu, cap)`` (TIS); ``masked`` with ``pi_old / mu`` inside ``[low, high]`` and 0 beyond it
            (MIS, IcePop, arXiv 2510.18855).
        level: level of the ratio; see ``RatioLevel``.
        cap: upper bound of the weight of ``truncated``.
        low, high: range of the ratio in which ``masked`` keeps a token.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    kind: Literal["none", "plain", "truncated", "masked"] = "none"
    level: RatioLevel = "token"
    cap: PositiveFloat = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ConfigurationError(
                f"correction.low is {self.low} and correction.high {self.high}; the kept range needs 0 <= low <= high"
            )

    def recomputes(self, recompute_old_logp: bool | None) -> bool | None:
        """Return ``recompute_old_logp``, or True where the correction needs pi_old from the learner.

        Raises:
            ConfigurationError: there is a correction, but pi_old is to be the sampler's.
        """
        if self.kind == "none":
            return recompute_old_logp
        if recompute_old_logp is False:
            raise ConfigurationError(
                f"correction {self.kind!r} weighs pi_old / mu, but recompute_old_logp is false, so pi_old is mu "
                "and the ratio corrects already; leave one of them out"
            )
        return True

    def weights(self, old_logp: Tensor, sampler_logp: Tensor, action_mask: Tensor) -> Tensor:
        """Return weights [B, T] without gradient, 0 outside the mask.

        With ``level`` ``sequence`` or ``geometric_mean`` one ratio of the row is both the test and the weight, so
        ``masked`` keeps or drops a row as a whole.

        >>> old, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -3.0]])
        >>> mask = torch.tensor([[True, True]])
        >>> Correction("truncated").weights(old, sampler, mask)  # e^-0.5, min(e^2, 2)
        tensor([[0.6065, 2.0000]])
        >>> Correction("masked").weights(old, sampler, mask)  # e^-0.5 kept, e^2 dropped
        tensor([[0.6065, 0.0000]])
        """
        if self.kind == "none":
            return action_mask.to(old_logp.dtype)
        ratio = self._ratio(old_logp, sampler_logp, action_mask)
        if self.kind == "truncated":
            ratio = ratio.clamp(max=self.cap)
        elif self.kind == "masked":
            kept = (ratio >= self.low) & (ratio <= self.high)
            # NaN compares false: without the second test a non-finite ratio would be dropped in silence.
            ratio = torch.where(kept | ratio.isnan(), ratio, 0.0)
        return masked_values(ratio, action_mask)

    def _ratio(self, logp: Tensor, sampler_logp: Tensor, action_mask: Tensor) -> Tensor:
        """Return ``pi / mu`` [B, T] at the level, without gradient."""
        log_ratio = masked_log_ratio(logp.detach(), sampler_logp, action_mask)
        if self.level == "token":
            return clamped_exp(log_ratio)
        total = log_ratio.sum(-1, keepdim=True)
        if self.level == "geometric_mean":
            total = total / action_mask.sum(-1, keepdim=True).clamp(min=1)
        return clamped_exp(total).expand_as(log_ratio)
