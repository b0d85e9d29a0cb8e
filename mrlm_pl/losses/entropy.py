"""The entropy bonus, and tokens of high entropy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, Settings


def top_entropy_threshold(entropies: Tensor, fraction: float) -> float:
    """Return the entropy threshold that the ``fraction`` of tokens with the highest entropy reach.

    Args:
        entropies: [N], entropies of all tokens in nats.
        fraction: fraction of the tokens, in (0, 1].

    Source: arXiv 2506.01939, which keeps 0.2.

    >>> import torch
    >>> round(top_entropy_threshold(torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.25), 3)  # a quarter of the way 0.3 to 0.4
    0.325
    """
    return float(numpy.quantile(entropies.double().cpu().numpy(), 1.0 - fraction))


@dataclass(frozen=True)
class Entropy(Settings):
    """The entropy bonus.

    Args:
        coefficient: weight of the bonus; with a target, its initial value.
        target: entropy in nats per token above which there is no bonus, and below which its weight rises; None keeps
            the weight. See :meth:`adapted`.
        delta: change of the weight per update.

    Raises:
        ConfigurationError: a value is out of range, or there is a ``delta`` without a target.
    """

    coefficient: NonNegativeFloat = 0.0
    target: PositiveFloat | None = None
    delta: PositiveFloat = 0.005

    def __post_init__(self) -> None:
        if self.target is None and self.delta != Entropy.delta:
            raise ConfigurationError(f"entropy.delta is {self.delta}, but there is no entropy.target; set one")

    def adapted(self, coefficient: float, entropy: float) -> tuple[float, float]:
        """Return the coefficient after an update, and the weight of the bonus in the next one (arXiv 2505.22312).

        With a target the coefficient rises by ``delta`` below it and falls by it elsewhere, not below 0; above the
        target the weight is 0.

        Args:
            coefficient: coefficient before the update; without a target it stays, and is the weight.
            entropy: mean entropy of the update's tokens, over all ranks.

        >>> settings, coefficient, weights = Entropy(target=0.5, delta=0.01), 0.0, []
        >>> for entropy in (0.4, 0.3, 0.6):
        ...     coefficient, weight = settings.adapted(coefficient, entropy)
        ...     weights.append(weight)
        >>> weights, coefficient
        ([0.01, 0.02, 0.0], 0.01)
        """
        if self.target is None:
            return coefficient, coefficient
        coefficient = max(0.0, coefficient + (self.delta if entropy < self.target else -self.delta))
        return coefficient, coefficient if entropy <= self.target else 0.0
