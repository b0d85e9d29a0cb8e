"""Policy losses: one value per token, minimised, exactly 0 outside the action mask.

Shapes: B rows (one sequence each), T tokens. ``logp`` carries the gradient; ``old_logp`` and ``advantages`` are
constants. ``rho = exp(logp - old_logp)`` is the importance ratio of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import clamped_exp, masked_log_ratio, masked_values
from mrlm_pl.settings import FractionAboveZero, PositiveFloat, Range, Settings


@dataclass(frozen=True)
class Clip(Settings):
    """The range ``[1 - low, 1 + high]`` in which the importance ratio has a gradient.

    Args:
        low: distance of the lower end from 1; 1 removes the lower end. None is the default of the loss, 0.2 for
            ``ppo``.
        high: distance of the upper end from 1; None is the default of the loss, 0.2 for ``ppo``.
        dual: bound ``c`` of the loss at negative advantages, ``-c A`` (arXiv 1912.09729); None sets no bound.

    Raises:
        ConfigurationError: a value is out of range.
    """

    low: FractionAboveZero | None = None
    high: PositiveFloat | None = None
    dual: Annotated[float, Range(lambda value: value > 1, "above 1 (3 is usual)")] | None = None

    def range(self, low: float, high: float, *, dual: bool = False) -> tuple[float, float]:
        """Return ``low`` and ``high``, by default those of the loss.

        Args:
            low, high: defaults of the loss.
            dual: whether the loss has a dual bound.

        Raises:
            ConfigurationError: there is a dual bound for a loss that has none.

        >>> Clip(high=0.28).range(0.2, 0.2)
        (0.2, 0.28)
        """
        if self.dual is not None and not dual:
            raise ConfigurationError(
                f"clip.dual is {self.dual}, but this loss bounds the weight at negative advantages in another way; "
                "leave it out, or choose ppo, gspo or luspo"
            )
        return low if self.low is None else self.low, high if self.high is None else self.high


def ppo_clip_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip = Clip()
) -> Tensor:
    """Return the clipped surrogate loss [B, T]: ``-min(rho A, clip(rho, 1 - low, 1 + high) A)``.

    Args:
        logp, old_logp, advantages: [B, T]; not read outside ``action_mask``.
        action_mask: [B, T] bool.
        clip: clipping range, by default ``[0.8, 1.2]`` (unequal: "clip higher"); its ``dual`` bounds the loss at
            negative advantages.

    Sources: arXiv 1707.06347 (PPO), 2503.14476 (asymmetric clip), 1912.09729 (dual clip).

    >>> mask = torch.tensor([[True]])
    >>> logp, old, bad = torch.tensor([[-0.5]]), torch.tensor([[-2.0]]), torch.tensor([[-1.0]])
    >>> round(ppo_clip_loss(logp, old, bad, mask).item(), 4)  # rho = e^1.5
    4.4817
    >>> ppo_clip_loss(logp, old, bad, mask, Clip(dual=3.0)).item()
    3.0
    """
    ratio = clamped_exp(masked_log_ratio(logp, old_logp, action_mask))
    advantages = masked_values(advantages.detach(), action_mask)
    return _clipped_surrogate(ratio, advantages, clip, 0.2, 0.2)


def policy_gradient_loss(logp: Tensor, advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Return the REINFORCE loss [B, T]: ``-A logp``.

    >>> policy_gradient_loss(torch.tensor([[-0.5]]), torch.tensor([[2.0]]), torch.tensor([[True]])).item()
    1.0
    """
    return -masked_values(advantages.detach(), action_mask) * masked_values(logp, action_mask)


def gspo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip = Clip()) -> Tensor:
    """Return GSPO's loss [B, T]: PPO's formula with ``s = exp(mean_t log rho)`` of the row for every token.

    The value of each token uses the row's ``s``; its gradient flows through that token's own ``logp``
    (``s_t = sg(s) pi / sg(pi)``). The default range is ``[1 - 3e-4, 1 + 4e-4]``. Reduce with ``sequence_mean``: then
    the gradient is that of the sequence-level objective. With ``sequence_sum`` it is LUSPO's.

    Sources: arXiv 2507.18071 (its token-level form), 2602.05261 (LUSPO).

    >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -1.1]])
    >>> advantages, mask = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> gspo_loss(logp, old, advantages, mask, Clip(1.0, 1.0))  # exp((0.5 + 0.1) / 2)
    tensor([[-1.3499, -1.3499]])
    """
    log_ratio = masked_log_ratio(logp, old_logp, action_mask)
    lengths = action_mask.sum(-1, keepdim=True).clamp(min=1)
    sequence_ratio = clamped_exp(log_ratio.detach().sum(-1, keepdim=True) / lengths)
    ratio = sequence_ratio * (log_ratio - log_ratio.detach()).exp()
    advantages = masked_values(advantages.detach(), action_mask)
    return masked_values(_clipped_surrogate(ratio, advantages, clip, 3e-4, 4e-4), action_mask)


def gmpo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip = Clip()) -> Tensor:
    """Return the geometric-mean loss [B, T]: ``-A exp(mean_t clip(log rho_t))`` of the row for every token.

    Each token's log-ratio is clipped, on the side to which its advantage pushes, to ``[-low, high]`` before the mean of
    the row. The gradient flows through the tokens that are not clipped. Reduce with ``sequence_mean``: then the
    gradient is that of the sequence-level objective.

    Args:
        logp, old_logp, advantages: [B, T]; not read outside ``action_mask``.
        action_mask: [B, T] bool.
        clip: clipping range; its ``low`` and ``high`` are the largest fall and rise of a token's log-ratio, by default
            0.4.

    Source: arXiv 2507.20673.

    >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-2.0, -1.2]])
    >>> gmpo_loss(logp, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))  # exp((0.4 + 0.2) / 2)
    tensor([[-1.3499, -1.3499]])
    """
    low, high = clip.range(0.4, 0.4)
    log_ratio = masked_log_ratio(logp, old_logp, action_mask)
    advantages = masked_values(advantages.detach(), action_mask)
    bounded = log_ratio.clamp(-low, high)
    log_ratio = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    lengths = action_mask.sum(-1, keepdim=True).clamp(min=1)
    sequence_ratio = clamped_exp(log_ratio.detach().sum(-1, keepdim=True) / lengths)
    ratio = sequence_ratio * (log_ratio - log_ratio.detach()).exp()
    return masked_values(-ratio * advantages, action_mask)


def cispo_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, action_mask: Tensor, clip: Clip = Clip()) -> Tensor:
    """Return the clipped-weight policy gradient [B, T]: ``-sg(clip(rho, 1 - low, 1 + high)) A logp``.

    Unlike PPO's clip, every token keeps a gradient. The default range is ``[0, 5]``: a ``low`` of 1 puts no lower bound
    on the weight, as in the paper, which tunes the upper bound only.

    Source: arXiv 2506.13585.

    >>> logp, old, mask = torch.tensor([[-0.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]])
    >>> round(cispo_loss(logp, old, torch.tensor([[1.0]]), mask, Clip(1.0, 0.2)).item(), 4)  # 1.2 * 0.5
    0.6
    """
    low, high = clip.range(1.0, 4.0)
    weight = clamped_exp(masked_log_ratio(logp.detach(), old_logp, action_mask)).clamp(1.0 - low, 1.0 + high)
    advantages = masked_values(advantages.detach(), action_mask)
    return -weight * advantages * masked_values(logp, action_mask)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: Clip, low: float, high: float) -> Tensor:
    low, high = clip.range(low, high, dual=True)
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if clip.dual is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -clip.dual * advantages), loss)
    return loss
