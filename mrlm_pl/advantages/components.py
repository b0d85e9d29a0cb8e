"""Advantages of rewards with several components."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import group_normalized_advantages


def component_normalized_advantages(
    components: Tensor, group_ids: Tensor, weights: Sequence[float] | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Return the weighted sum [N] fp64 of the components' advantages, each normalized within its group.

    Components of different scale or frequency count alike, and two episodes with the same total but other components
    differ. Whiten the result over the batch (:func:`mrlm_pl.advantages.whiten`): its scale depends on the number of
    components.

    Args:
        components: [N, K] reward components of N episodes.
        group_ids: [N] int64.
        weights: K weights; None weighs all alike.
        eps: added to each standard deviation, in units of reward.

    Raises:
        ValueError: there is not one weight for each component.
        NonFiniteError: a component is NaN or infinite.

    Source: arXiv 2601.05242 (GDPO).

    >>> components = torch.tensor([[2.0, 0.0], [0.0, 20.0], [1.0, 10.0]])  # normalized: 1, -1, 0 and -1, 1, 0
    >>> one_group = torch.zeros(3, dtype=torch.int64)
    >>> [round(x, 4) for x in component_normalized_advantages(components, one_group, [2.0, 1.0]).tolist()]
    [1.0, -1.0, 0.0]
    """
    if weights is not None and len(weights) != components.shape[1]:
        raise ValueError(f"{len(weights)} weights for {components.shape[1]} reward components; give one for each")
    parts = [group_normalized_advantages(part, group_ids, eps=eps).double() for part in components.double().T]
    factors = weights or [1.0] * len(parts)
    return torch.stack([factor * part for factor, part in zip(factors, parts, strict=True)]).sum(0)
