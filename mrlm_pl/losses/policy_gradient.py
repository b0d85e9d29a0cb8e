"""Policy losses: one value per token, minimised, exactly 0 outside the action mask.

Shapes: B rows (one sequence each), T tokens. ``logp`` carries the gradient; ``old_logp`` and ``advantages`` are
constants. ``rho = exp(logp - old_logp)`` is the importance ratio of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import clamped_exp, masked_log_ratio, masked_values


def ppo_clip_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate loss [B, T]: ``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)``.

    Args:
        logp, old_logp, advantages: [B, T]; values outside ``action_mask`` are never read.
        action_mask: [B, T] bool.
        clip_low, clip_high: half-widths of the clip range below and above 1 (unequal: "clip higher").
        dual_clip: ``c > 1`` caps the loss of a token with ``A < 0`` at ``-c A``; None leaves it unbounded.

    Raises:
        ConfigurationError: a clip width is negative, or ``dual_clip`` is not above 1.

    Sources: arXiv 1707.06347 (PPO), 2503.14476 (asymmetric clip), 1912.09729 (dual clip).

    >>> mask = torch.tensor([[True]])
    >>> logp, old, bad = torch.tensor([[-0.5]]), torch.tensor([[-2.0]]), torch.tensor([[-1.0]])
    >>> round(ppo_clip_loss(logp, old, bad, mask).item(), 4)  # rho = e^1.5
    4.4817
    >>> ppo_clip_loss(logp, old, bad, mask, dual_clip=3.0).item()
    3.0
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ConfigurationError(f"dual_clip is {dual_clip}; it must be above 1 (3 is usual), or None to leave it off")
    ratio = clamped_exp(masked_log_ratio(logp, old_logp, action_mask))
    advantages = masked_values(advantages.detach(), action_mask)
    loss = _clipped_surrogate(ratio, advantages, clip_low, clip_high)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return masked_values(loss, action_mask)


def policy_gradient_loss(logp: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """REINFORCE loss [B, T]: ``-A logp``.

    >>> policy_gradient_loss(torch.tensor([[-0.5]]), torch.tensor([[2.0]]), torch.tensor([[True]])).item()
    1.0
    """
    advantages = masked_values(advantages.detach(), action_mask)
    return masked_values(-advantages * masked_values(logp, action_mask), action_mask)


def gspo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Sequence-ratio clipped loss [B, T]: PPO's formula with ``s = exp(mean_t log rho)`` of the row for every token.

    The value of each token uses the row's ``s``; its gradient flows through that token's own ``logp``
    (``s_t = sg(s) pi / sg(pi)``). Reduce with ``sequence_mean``: then the gradient is that of the sequence-level
    objective.

    Source: arXiv 2507.18071 (its token-level form).

    >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.1]])
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> gspo_loss(logp, old, advantages, mask, clip_low=1.0, clip_high=1.0)  # exp((.5 + .1) / 2)
    tensor([[-1.3499, -1.3499]])
    """
    log_ratio = masked_log_ratio(logp, old_logp, action_mask)
    lengths = action_mask.sum(-1, keepdim=True).clamp(min=1)
    sequence_ratio = clamped_exp(log_ratio.detach().sum(-1, keepdim=True) / lengths)
    ratio = sequence_ratio * (log_ratio - log_ratio.detach()).exp()
    advantages = masked_values(advantages.detach(), action_mask)
    return masked_values(_clipped_surrogate(ratio, advantages, clip_low, clip_high), action_mask)


def cispo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Tensor:
    """Clipped-weight policy gradient [B, T]: ``-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A logp``.

    Unlike PPO's clip, every token keeps a gradient. The default ``clip_low=1`` puts no lower bound on the weight,
    as in the paper, which tunes the upper bound only.

    Source: arXiv 2506.13585.

    >>> logp, old, mask = torch.tensor([[-0.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]])
    >>> round(cispo_loss(logp, old, torch.tensor([[1.0]]), mask, clip_high=0.2).item(), 4)  # 1.2 * .5
    0.6
    """
    _check_clip(clip_low, clip_high)
    ratio = clamped_exp(masked_log_ratio(logp.detach(), old_logp, action_mask))
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    advantages = masked_values(advantages.detach(), action_mask)
    return masked_values(-weight * advantages * masked_values(logp, action_mask), action_mask)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    _check_clip(clip_low, clip_high)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ConfigurationError(
            f"clip_low={clip_low}, clip_high={clip_high}: both are widths and must not be negative"
        )
