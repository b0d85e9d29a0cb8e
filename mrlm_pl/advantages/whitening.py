"""Whitening over the global batch, with moments that merge over micro-batches and ranks."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from mrlm_pl.losses.masking import masked_values


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a set of numbers; ``a + b`` are those of both sets together.

    Chan's merge keeps the digits that a difference of raw sums would lose, and equal numbers keep a variance of
    exactly 0.
    """

    count: float
    mean: float
    squared_sum: float

    def __add__(self, other: Moments) -> Moments:
        # An empty side is left out, not merged: even a mean of weight 1 would pick up a rounding error.
        if self.count == 0:
            return other
        if other.count == 0:
            return self
        count = self.count + other.count
        shift = other.mean - self.mean
        return Moments(
            count,
            self.mean + shift * other.count / count,
            self.squared_sum + other.squared_sum + shift**2 * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two numbers.

        >>> Moments(count=2, mean=0.0, squared_sum=2.0).std
        1.4142135623730951
        """
        return (self.squared_sum / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0


NO_MOMENTS = Moments(0, 0.0, 0.0)
"""Moments of no numbers."""


def masked_moments(values: Tensor, mask: Tensor) -> Moments:
    """Return the moments of the entries of ``values`` [B, T] where ``mask`` is True.

    >>> import torch
    >>> masked_moments(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]]))
    Moments(count=2, mean=2.0, squared_sum=2.0)
    """
    kept = masked_values(values.detach(), mask)[mask].double()
    if not kept.numel():
        return NO_MOMENTS
    anchor = kept[0]  # equal numbers lie exactly 0 from it, so that no rounding makes up a variance
    heights = kept - anchor
    shift = heights.mean()
    return Moments(kept.numel(), (anchor + shift).item(), (heights - shift).square().sum().item())


def whiten(values: Tensor, mask: Tensor, moments: Moments | None = None, *, eps: float = 1e-8) -> Tensor:
    """Return ``(values - mean) / sqrt(variance + eps)`` [B, T], 0 outside the mask; equal values become exactly 0.

    Args:
        values: [B, T]; not read outside ``mask``.
        mask: [B, T] bool.
        moments: moments of the GLOBAL batch (add up ``masked_moments`` of its parts); None takes these values as the
            whole.
        eps: constant added to the unbiased variance, as in TRL and verl: values that differ by rounding alone stay
            small.

    >>> import torch
    >>> whiten(torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])).tolist()
    [[-1.0, 0.0, 1.0, 0.0]]
    """
    if moments is None:
        moments = masked_moments(values, mask)
    kept = masked_values(values.detach(), mask)
    whitened = (kept.double() - moments.mean) / (moments.std**2 + eps) ** 0.5
    return masked_values(whitened.to(kept.dtype), mask)
