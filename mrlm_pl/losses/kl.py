"""Per-token estimates of ``KL(pi_theta || pi_ref)`` from tokens that ``pi_theta`` sampled.

Sign convention: ``d = logp - ref_logp`` (learner minus reference), so the mean of ``d`` over sampled tokens is the KL
divergence. ``ref_logp`` is a constant to the gradient. Source: J. Schulman, "Approximating KL divergence" (2020).

As a penalty inside the reward use ``kl_k1`` (unbiased value, no gradient needed). As a loss term ``kl_k3`` is common,
but its gradient is that of another divergence; ``kl_k2`` has the right gradient, and ``kl_k3_straight_through`` pairs
that gradient with k3's low-variance value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.losses.masking import MAX_LOG_RATIO, clamped_exp, masked_log_ratio


def kl_k1(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return ``d`` [B, T], 0 outside the mask: unbiased, may be negative.

    >>> kl_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])).item()
    0.5
    """
    return masked_log_ratio(logp, ref_logp, action_mask)


def kl_k2(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return ``d^2 / 2`` [B, T], 0 outside the mask: a biased value, but ``d * grad(logp)`` is the unbiased gradient.

    >>> kl_k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])).item()
    0.125
    """
    return 0.5 * masked_log_ratio(logp, ref_logp, action_mask).square()


def kl_k3(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return ``exp(-d) + d - 1`` [B, T], 0 outside the mask: unbiased, never negative.

    >>> round(kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])).item(), 6)
    0.106531
    """
    difference = masked_log_ratio(logp, ref_logp, action_mask)
    # expm1 keeps the digits that exp(-d) - 1 loses for the small d of a healthy run.
    return torch.expm1(-difference.clamp(min=-MAX_LOG_RATIO)) + difference


def kl_k3_straight_through(logp: Tensor, ref_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return k3's value with k2's gradient [B, T], 0 outside the mask.

    >>> logp = torch.tensor([[-1.0]], requires_grad=True)
    >>> loss = kl_k3_straight_through(logp, torch.tensor([[-1.5]]), torch.tensor([[True]]))
    >>> loss.sum().backward()
    >>> round(loss.item(), 6), logp.grad.item()  # k3(0.5), d
    (0.106531, 0.5)
    """
    k2 = kl_k2(logp, ref_logp, action_mask)
    return kl_k3(logp, ref_logp, action_mask).detach() + (k2 - k2.detach())


def kl_k3_importance_weighted(logp: Tensor, ref_logp: Tensor, old_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return ``rho k3`` [B, T] with ``rho = exp(logp - old_logp)``, 0 outside the mask.

    Its value and its gradient are unbiased also where ``old_logp`` sampled the tokens and ``logp`` has moved on.

    Source: arXiv 2512.02556 (DeepSeek-V3.2).

    >>> logp, ref, old = (torch.tensor([[x]]) for x in (-1.0, -1.5, -1.2))
    >>> round(kl_k3_importance_weighted(logp, ref, old, torch.tensor([[True]])).item(), 6)  # e^0.2 * 0.106531
    0.130117
    """
    return clamped_exp(masked_log_ratio(logp, old_logp, action_mask)) * kl_k3(logp, ref_logp, action_mask)
