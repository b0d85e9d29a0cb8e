"""Policy losses that bound the update without PPO's clip: with soft gates, weights and masks.

Shapes: B rows (one sequence each), T tokens. ``logp`` carries the gradient; ``old_logp`` and ``advantages`` are
constants. ``rho = exp(logp - old_logp)`` is the importance ratio of a token. Losses are exactly 0 outside the action
mask.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mrlm_pl.losses.masking import MAX_LOG_RATIO, clamped_exp, masked_log_ratio, masked_values
from mrlm_pl.losses.policy_gradient import Clip


def sapo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    positive_temperature: float = 1.0,
    negative_temperature: float = 1.05,
) -> Tensor:
    """Return the soft adaptive loss [B, T]: ``-(4 / tau) sigmoid(tau (rho - 1)) A``.

    The gradient is that of REINFORCE at ``rho = 1`` and falls smoothly as the ratio leaves 1 on either side.

    Args:
        logp, old_logp, advantages: [B, T]; not read outside ``action_mask``.
        action_mask: [B, T] bool.
        positive_temperature: ``tau`` where the advantage is above 0.
        negative_temperature: ``tau`` elsewhere; with a higher one the gradient falls faster.

    Source: arXiv 2511.20347.

    >>> logp, mask = torch.tensor([[-1.0]]), torch.tensor([[True]])
    >>> sapo_loss(logp, logp, torch.tensor([[1.0]]), mask).item()  # 4 sigmoid(0)
    -2.0
    """
    ratio = clamped_exp(masked_log_ratio(logp, old_logp, action_mask))
    advantages = masked_values(advantages.detach(), action_mask)
    temperature = torch.full_like(advantages, negative_temperature).masked_fill(advantages > 0, positive_temperature)
    return -4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0)) * advantages


def vespo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    positive_shape: tuple[float, float] = (2.0, 3.0),
    negative_shape: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Return the REINFORCE loss [B, T] weighted by the ratio of the sequence: ``-sg(phi(W)) A logp``.

    ``W`` is the product of the row's ratios, with ``log W`` in [log 1e-8, 20], and ``phi(W) = e^l W^k e^(-l W)``,
    which is 1 at ``W = 1`` and vanishes at both ends.

    Args:
        logp, old_logp, advantages: [B, T]; not read outside ``action_mask``.
        action_mask: [B, T] bool.
        positive_shape: ``(k, l)`` where the advantage is at least 0.
        negative_shape: ``(k, l)`` where it is below 0.

    Source: arXiv 2602.10693.

    >>> logp, mask = torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]])
    >>> vespo_loss(logp, logp, torch.ones(1, 2), mask).tolist()  # W = 1
    [[1.0, 2.0]]
    """
    log_ratio = masked_log_ratio(logp.detach(), old_logp, action_mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_weight = log_ratio.sum(-1, keepdim=True).clamp(math.log(1e-8), MAX_LOG_RATIO)
    advantages = masked_values(advantages.detach(), action_mask)
    k, scale = (
        torch.full_like(advantages, positive).masked_fill(advantages < 0, negative)
        for positive, negative in zip(positive_shape, negative_shape, strict=True)
    )
    phi = (scale + k * log_weight - scale * log_weight.exp()).exp()
    return masked_values(-phi * advantages * masked_values(logp, action_mask), action_mask)


def dppo_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    clip: Clip = Clip(),  # noqa: B008 (frozen)
    largest_ratio: float = 20.0,
) -> Tensor:
    """Return the loss [B, T] of the tokens within a trust region: ``-sg(min(rho, largest_ratio)) A logp``.

    A token is left out where its probability has already moved with the advantage by more than ``clip.high`` up or
    ``clip.low`` down. Unlike a ratio, the difference of probabilities lets rare tokens change by large factors.

    Args:
        logp, old_logp, advantages: [B, T]; not read outside ``action_mask``.
        action_mask: [B, T] bool.
        clip: bounds; its ``low`` and ``high`` are the largest fall and rise of a token's probability, by default 0.2.
        largest_ratio: upper bound of the importance weight.

    Source: arXiv 2602.04879 (DPPO, binary total variation).

    >>> old, new = torch.tensor([[0.01, 0.5]]).log(), torch.tensor([[0.05, 0.8]]).log()
    >>> loss = dppo_loss(new, old, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    >>> [round(x, 4) for x in loss[0].tolist()]  # 5 * -log 0.05; 0.8 is more than 0.2 above 0.5
    [14.9787, 0.0]
    """
    low, high = clip.range(0.2, 0.2)
    weight = clamped_exp(masked_log_ratio(logp.detach(), old_logp, action_mask)).clamp(max=largest_ratio)
    advantages = masked_values(advantages.detach(), action_mask)
    logp = masked_values(logp, action_mask)
    moved = logp.detach().exp() - masked_values(old_logp.detach(), action_mask).exp()
    within = torch.where(advantages > 0, moved <= high, moved >= -low)
    return masked_values(-weight * advantages * logp, action_mask & within)


def off_policy_sequence_mask(
    logp: Tensor, behavior_logp: Tensor, advantages: Tensor, action_mask: Tensor, threshold: float
) -> Tensor:
    """Return [B, T] bool, the action mask without tokens of negative advantage in rows that are far off-policy.

    A row is far off-policy where the mean of ``behavior_logp - logp`` over its action tokens is above ``threshold``.

    Source: arXiv 2512.02556 (DeepSeek-V3.2).

    >>> behavior, mask = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.ones(2, 2, dtype=torch.bool)
    >>> advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])
    >>> off_policy_sequence_mask(behavior - 2, behavior, advantages, mask, 1.0).tolist()
    [[False, False], [True, True]]
    """
    divergence = -masked_log_ratio(logp.detach(), behavior_logp, action_mask)
    mean = divergence.sum(-1, keepdim=True) / action_mask.sum(-1, keepdim=True).clamp(min=1)
    return action_mask & ((advantages >= 0) | (mean <= threshold))
