"""From numbers per row or per turn to numbers per token. B rows, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.losses.masking import last_token_mask, masked_values


def broadcast_to_tokens(advantages: Tensor, action_mask: Tensor) -> Tensor:
    """Each row's number [B] on all of its action tokens [B, T], 0 elsewhere.

    >>> broadcast_to_tokens(torch.tensor([2.0]), torch.tensor([[False, True, True]])).tolist()
    [[0.0, 2.0, 2.0]]
    """
    if advantages.shape != action_mask.shape[:1]:
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}; give one number per row of the mask, [B]")
    return masked_values(advantages[:, None].expand(action_mask.shape), action_mask)


def rewards_at_last_token(rewards: Tensor, action_mask: Tensor) -> Tensor:
    """Each row's reward [B] on its last action token [B, T], 0 elsewhere.

    >>> rewards_at_last_token(torch.tensor([2.0]), torch.tensor([[True, True, False]])).tolist()
    [[0.0, 2.0, 0.0]]
    """
    return broadcast_to_tokens(rewards, last_token_mask(action_mask))


def turn_discounts(action_mask: Tensor, gamma: float) -> Tensor:
    """``gamma`` [B, T] on the last action token of each turn, 1 on its other tokens, 0 outside the mask.

    A turn is an unbroken run of action tokens: what the policy sampled between two pieces of environment text. Given as
    ``gamma`` to the functions of this package, it makes the discount count turns instead of tokens.

    >>> mask = torch.tensor([[True, True, False, True]])
    >>> turn_discounts(mask, 0.5).tolist()
    [[1.0, 0.5, 0.0, 0.5]]
    """
    followed = torch.cat([action_mask[:, 1:], torch.zeros_like(action_mask[:, :1])], dim=1)
    discounts = torch.ones(action_mask.shape, device=action_mask.device).masked_fill(~followed, gamma)
    return masked_values(discounts, action_mask)
