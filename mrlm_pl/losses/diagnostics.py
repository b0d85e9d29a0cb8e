"""Numbers to log about a batch of tokens, without gradient; a mask without a True token gives NaN, not a made-up 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from mrlm_pl.losses.kl import kl_k3
from mrlm_pl.losses.masking import clamped_exp, masked_log_ratio, masked_values


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean (0-dim) of ``values`` [B, T] where ``mask`` is True.

    >>> import torch
    >>> masked_mean(torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]])).item()
    2.0
    """
    return masked_values(values.detach(), mask).sum() / mask.sum()


def masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Return the largest (0-dim) of ``values`` [B, T] where ``mask`` is True.

    >>> import torch
    >>> masked_max(torch.tensor([[-3.0, -1.0, 9.0]]), torch.tensor([[True, True, False]])).item()
    -1.0
    """
    kept = masked_values(values.detach(), mask).masked_fill(~mask, -math.inf).flatten()
    return torch.where(mask.any(), F.pad(kept, (1, 0), value=-math.inf).max(), math.nan)


def approx_kl(logp: Tensor, old_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return k3's estimate (0-dim, never negative) of ``KL(pi_old || pi)`` from the tokens that pi_old sampled.

    The expectation is under the policy that sampled, so the roles are those of ``kl_k3(old_logp, logp)``. It is 0 in
    the first update on a rollout.

    >>> import torch
    >>> round(approx_kl(torch.tensor([[-1.5]]), torch.tensor([[-1.0]]), torch.tensor([[True]])).item(), 6)
    0.106531
    """
    return masked_mean(kl_k3(old_logp.detach(), logp, action_mask), action_mask)


def ratio_max_deviation(logp: Tensor, old_logp: Tensor, action_mask: Tensor) -> Tensor:
    """Return the largest ``|rho - 1|`` (0-dim) of the action tokens; below 1e-4 at the first mini-batch of fresh data.

    >>> import torch
    >>> logp, old = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -0.5]])
    >>> round(ratio_max_deviation(logp, old, torch.tensor([[True, True]])).item(), 4)  # 1 - e^-0.5
    0.3935
    """
    ratio = clamped_exp(masked_log_ratio(logp.detach(), old_logp, action_mask))
    return masked_max((ratio - 1.0).abs(), action_mask)


def mismatch(learner_logp: Tensor, sampler_logp: Tensor, action_mask: Tensor) -> dict[str, Tensor]:
    """Return the distance of the learner's distribution from the sampler's, from the sampler's tokens; each 0-dim.

    With ``w = pi / mu`` per token: ``k1`` the mean of ``-log w`` and ``k3`` that of ``w - 1 - log w``, two estimates of
    ``KL(mu || pi)`` in nats; ``mean_ratio`` the mean of ``w``, whose expectation is 1; ``chi_square`` the mean of
    ``w^2`` less 1; ``max_ratio`` the largest ``w``. Kish's effective sample size over the number of tokens is
    ``mean_ratio^2 / (chi_square + 1)``, 1 when all weights are equal.

    >>> import torch
    >>> distances = mismatch(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[True, True]]))
    >>> {name: round(value.item(), 4) for name, value in distances.items()}    # w = 1, e
    {'k1': -0.5, 'k3': 0.3591, 'mean_ratio': 1.8591, 'chi_square': 3.1945, 'max_ratio': 2.7183}
    """
    log_ratio = masked_log_ratio(learner_logp.detach(), sampler_logp, action_mask)
    weights = clamped_exp(log_ratio)
    return {
        "k1": masked_mean(-log_ratio, action_mask),
        "k3": masked_mean(weights - 1.0 - log_ratio, action_mask),
        "mean_ratio": masked_mean(weights, action_mask),
        "chi_square": masked_mean(weights.square(), action_mask) - 1.0,
        "max_ratio": masked_max(weights, action_mask),
    }
