"""The entropy bonus, and tokens of high entropy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import at_least, positive


def top_entropy_threshold(entropies: Tensor, fraction: float) -> float:
    """Return the entropy that the ``fraction`` of tokens with the highest entropy reach.

    Args:
        entropies: [N] in nats, of all tokens.
        fraction: in (0, 1].

    Source: arXiv 2506.01939, which keeps .2.

    >>> import torch
    >>> round(top_entropy_threshold(torch.tensor([0.1, 0.2, 0.3, 0.4]), 0.25), 3)  # a quarter of the way from .3 to .4
    0.325
    """
    return float(numpy.quantile(entropies.double().cpu().numpy(), 1.0 - fraction))


@dataclass(frozen=True)
class Entropy:
    """The entropy bonus.

    Args:
        coefficient: weight of the bonus; with a target, at the start.
        target: entropy in nats per token above which there is no bonus, and below which its weight rises; None keeps
            the weight. See :class:`EntropyController`.
        delta: change of the weight per update.

    Raises:
        ConfigurationError: a value is out of range, or there is a ``delta`` without a target.
    """

    coefficient: float = 0.0
    target: float | None = None
    delta: float = 0.005

    def __post_init__(self) -> None:
        at_least(0, "entropy.", coefficient=self.coefficient)
        positive("entropy.", target=self.target, delta=self.delta)
        if self.target is None and self.delta != Entropy.delta:
            raise ConfigurationError(f"entropy.delta is {self.delta}, but there is no entropy.target; set one")


class EntropyController:
    """Weight of the entropy bonus.

    After each update with entropy ``H``, ``c`` rises by ``delta`` where ``H < target`` and falls by it elsewhere, not
    below 0; the weight of the next update is ``c`` where ``H <= target``, else 0.

    Args:
        entropy: the first weight, the target (None keeps the weight) and ``delta``.

    Attributes:
        coefficient: ``c``.
        weight: of the bonus in the next update.

    Source: arXiv 2505.22312.

    >>> controller, weights = EntropyController(Entropy(target=0.5, delta=0.01)), []
    >>> for entropy in (0.4, 0.3, 0.6):
    ...     controller.update(entropy)
    ...     weights.append(controller.weight)
    >>> weights, controller.coefficient
    ([0.01, 0.02, 0.0], 0.01)
    """

    def __init__(self, entropy: Entropy) -> None:
        self.entropy = entropy
        self.coefficient = self.weight = entropy.coefficient

    def update(self, entropy: float) -> None:
        """Adapt the weight to the mean entropy of an update's tokens, over all ranks."""
        target, delta = self.entropy.target, self.entropy.delta
        if target is not None:
            self.coefficient = max(0.0, self.coefficient + (delta if entropy < target else -delta))
            self.weight = self.coefficient if entropy <= target else 0.0
