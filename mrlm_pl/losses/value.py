"""Regression loss of a value head."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses.masking import masked_values


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, action_mask: Tensor, *, clip: float | None = 0.2
) -> Tensor:
    """Return the value loss [B, T]; 0 outside the mask.

    It is ``0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2)``.

    Args:
        values: [B, T], current values, which carry the gradient.
        old_values, returns: [B, T], constants from the start of the update.
        clip: half-width of the range around ``old_values`` in units of return; None is the plain ``0.5 (V - R)^2``.

    Raises:
        ConfigurationError: ``clip`` is negative.

    >>> value, old, target = torch.tensor([[0.5]]), torch.tensor([[0.0]]), torch.tensor([[1.0]])
    >>> round(value_loss(value, old, target, torch.tensor([[True]])).item(), 6)  # 0.5 (0.2 - 1)^2
    0.32
    """
    if clip is not None and clip < 0:
        raise ConfigurationError(f"the value clip is {clip}; give a width of 0 or more, or None to leave it off")
    values = masked_values(values, action_mask)
    returns = masked_values(returns.detach(), action_mask)
    squared_error = (values - returns).square()
    if clip is not None:
        old_values = masked_values(old_values.detach(), action_mask)
        clipped = old_values + (values - old_values).clamp(-clip, clip)
        squared_error = torch.maximum(squared_error, (clipped - returns).square())
    return 0.5 * squared_error
