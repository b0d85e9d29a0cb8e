"""Corrections for data whose sampler ``mu`` is not the policy that the update starts from.

An inference engine's numerics, a quantised engine or a stale weight version make ``mu != pi_old``. The weights here
multiply a token loss. When ``old_logp`` *is* the sampler's recorded log-prob (no recomputation), the PPO ratio already
carries the correction: do not multiply by a weight as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import clamped_exp, masked_log_ratio, masked_values

RatioLevel = Literal["token", "sequence", "geometric_mean"]
"""``token``: each token's ratio; ``sequence``: the product over the row's action tokens, the same for all of them;
``geometric_mean``: that product to the power 1 / number of action tokens."""


def truncated_importance_weight(
    old_logp: Tensor,
    sampler_logp: Tensor,
    action_mask: Tensor,
    *,
    cap: float = 2.0,
    level: RatioLevel = "token",
) -> Tensor:
    """Truncated importance weight [B, T] (TIS): ``min(pi_old / mu, cap)``, without gradient, 0 outside the mask.

    Raises:
        ConfigurationError: ``cap`` is not positive, or ``level`` is unknown.

    >>> old, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -3.0]])
    >>> truncated_importance_weight(old, sampler, torch.tensor([[True, True]]))  # e^-.5, min(e^2, 2)
    tensor([[0.6065, 2.0000]])
    """
    if cap <= 0:
        raise ConfigurationError(f"cap is {cap}; a truncated weight needs a positive cap (2 is usual)")
    ratio = _importance_ratio(old_logp, sampler_logp, action_mask, level)
    return masked_values(ratio.clamp(max=cap), action_mask)


def masked_importance_weight(
    old_logp: Tensor,
    sampler_logp: Tensor,
    action_mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
    level: RatioLevel = "token",
) -> Tensor:
    """Masked importance weight [B, T] (MIS, IcePop): ``pi_old / mu`` inside ``[low, high]``, 0 beyond it.

    With ``level`` ``sequence`` or ``geometric_mean`` one ratio of the row is both the test and the weight, so a row is
    kept or dropped as a whole. No gradient; 0 outside the mask.

    Raises:
        ConfigurationError: ``0 <= low <= high`` does not hold, or ``level`` is unknown.

    Source: arXiv 2510.18855 (token level, [0.5, 5]).

    >>> old, sampler = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.5, -3.0]])
    >>> masked_importance_weight(old, sampler, torch.tensor([[True, True]]))  # e^-.5 kept, e^2 dropped
    tensor([[0.6065, 0.0000]])
    """
    if not 0 <= low <= high:
        raise ConfigurationError(f"low={low}, high={high}: the kept range needs 0 <= low <= high")
    ratio = _importance_ratio(old_logp, sampler_logp, action_mask, level)
    kept = (ratio >= low) & (ratio <= high)
    # NaN compares false: without the second test a non-finite ratio would be dropped in silence.
    return masked_values(torch.where(kept | ratio.isnan(), ratio, 0.0), action_mask)


@dataclass(frozen=True)
class Correction:
    """How a token loss is weighted for a sampler ``mu`` that is not the policy ``pi_old`` the update starts from.

    Args:
        kind: ``none``; ``plain`` multiplies with ``pi_old / mu`` (decoupled PPO, arXiv 2505.24298); ``truncated`` with
            ``min(pi_old / mu, cap)`` (TIS); ``masked`` with ``pi_old / mu`` inside ``[low, high]`` and 0 beyond it
            (MIS, IcePop, arXiv 2510.18855).
        level: of the ratio; see ``RatioLevel``.
        cap: of ``truncated``.
        low, high: of ``masked``.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    kind: Literal["none", "plain", "truncated", "masked"] = "none"
    level: RatioLevel = "token"
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        kinds = ("none", "plain", "truncated", "masked")
        if self.kind not in kinds or self.level not in get_args(RatioLevel):
            raise ConfigurationError(
                f"correction has kind {self.kind!r} and level {self.level!r}; "
                f"choose from {', '.join(kinds)} and from {', '.join(get_args(RatioLevel))}"
            )
        if self.cap <= 0 or not 0 <= self.low <= self.high:
            raise ConfigurationError(
                f"correction has cap {self.cap}, low {self.low} and high {self.high}; "
                "cap must be positive, and 0 <= low <= high"
            )

    def recomputes(self, recompute_old_logp: bool | None) -> bool | None:
        """``recompute_old_logp``, or True where the correction needs pi_old from the learner.

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
        """Weights [B, T] without gradient, 0 outside the mask.

        >>> old, sampler, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), torch.tensor([[True]])
        >>> [round(Correction(kind).weights(old, sampler, mask).item(), 4) for kind in ("none", "plain", "truncated")]
        [1.0, 2.7183, 2.0]
        """
        if self.kind == "none":
            return action_mask.to(old_logp.dtype)
        if self.kind == "plain":
            return masked_values(_importance_ratio(old_logp, sampler_logp, action_mask, self.level), action_mask)
        if self.kind == "truncated":
            return truncated_importance_weight(old_logp, sampler_logp, action_mask, cap=self.cap, level=self.level)
        return masked_importance_weight(
            old_logp, sampler_logp, action_mask, low=self.low, high=self.high, level=self.level
        )


def _importance_ratio(logp: Tensor, sampler_logp: Tensor, action_mask: Tensor, level: RatioLevel) -> Tensor:
    """``pi / mu`` [B, T] at the given level, without gradient."""
    log_ratio = masked_log_ratio(logp.detach(), sampler_logp, action_mask)
    if level == "token":
        return clamped_exp(log_ratio)
    total = log_ratio.sum(-1, keepdim=True)
    if level == "sequence":
        return clamped_exp(total).expand_as(log_ratio)
    if level == "geometric_mean":
        lengths = action_mask.sum(-1, keepdim=True).clamp(min=1)
        return clamped_exp(total / lengths).expand_as(log_ratio)
    raise ConfigurationError(f"level is {level!r}; choose token, sequence or geometric_mean")
