"""Supervised token loss."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.losses.masking import masked_values


def cross_entropy_loss(logp: Tensor, token_mask: Tensor) -> Tensor:
    """Cross-entropy [B, T]: ``-logp`` of the observed tokens where ``token_mask`` is True, else exactly 0.

    The mask holds the trained tokens: the action tokens (end-of-sequence included) for behavioral cloning, the tokens
    of the next observation for a world model. A mixture is the weighted sum of the two *reduced* losses, each with the
    denominator of its own mask. A row without such tokens contributes 0, never NaN.

    >>> import torch
    >>> cross_entropy_loss(torch.tensor([[-0.5, float("-inf")]]), torch.tensor([[True, False]])).tolist()
    [[0.5, 0.0]]
    """
    return masked_values(-logp, token_mask)
