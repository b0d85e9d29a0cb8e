"""Tokens of high entropy, and a coefficient that steers the entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def top_entropy_mask(entropy: Tensor, action_mask: Tensor, fraction: float) -> Tensor:
    """Return [B, T] bool, True at the ``fraction`` of action tokens with the highest entropy.

    Args:
        entropy: [B, T] in nats.
        action_mask: [B, T] bool.
        fraction: proportion of tokens to keep, in (0, 1]; ties at the threshold are kept.

    Source: arXiv 2506.01939, which keeps .2.

    >>> entropy = torch.tensor([[0.1, 0.2, 0.3, 0.4, 9.0]])
    >>> top_entropy_mask(entropy, torch.tensor([[True, True, True, True, False]]), 0.25).tolist()
    [[False, False, False, True, False]]
    """
    if not action_mask.any():
        return action_mask
    threshold = torch.quantile(entropy[action_mask].float(), 1.0 - fraction)
    return action_mask & (entropy >= threshold)


@dataclass
class EntropyController:
    """Coefficient of the entropy bonus that rises while the entropy is below its target.

    Args:
        target: entropy in nats per token.
        delta: change of the coefficient per update.
        coefficient: value at the start.

    Source: arXiv 2505.22312.

    >>> controller = EntropyController(target=0.5, delta=0.01)
    >>> controller.update(0.4), controller.update(0.3), controller.update(0.6)
    (0.01, 0.02, 0.0)
    >>> controller.coefficient
    0.01
    """

    target: float
    delta: float = 0.005
    coefficient: float = 0.0

    def update(self, entropy: float) -> float:
        """Return the coefficient to apply next: 0 while the entropy is above the target."""
        self.coefficient = max(0.0, self.coefficient + (self.delta if entropy < self.target else -self.delta))
        return self.coefficient if entropy <= self.target else 0.0
