"""The entropy bonus in the losses of policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.losses import Entropy


class EntropyBonus:
    """The entropy bonus of each policy, with its own weight.

    Args:
        entropy: settings of the bonus.
        policies: names of the policies.

    Attributes:
        used: whether the bonus has a weight, now or later.
        weights: current coefficient of each policy, and its weight in the next update.
    """

    def __init__(self, entropy: Entropy, policies: Sequence[str]) -> None:
        self.settings = entropy
        self.used = entropy.coefficient > 0 or entropy.target is not None
        self.weights = dict.fromkeys(policies, (entropy.coefficient, entropy.coefficient))

    def of_losses(self, name: str, entropy: Tensor) -> Tensor:
        """Return the bonus as a loss [B, T], 0 or below, from the entropies [B, T] of a policy in nats."""
        return -self.weights[name][1] * entropy

    def steer(self, metrics: Metrics) -> None:
        """With a target, log the weights of the update, and adapt them to its mean entropies over all ranks."""
        if self.settings.target is None:
            return
        for name, (coefficient, weight) in self.weights.items():
            entropy = metrics.update.get(metrics.name("entropy", name))
            if entropy is not None:
                metrics.log({metrics.name("entropy_coefficient", name): weight})
                self.weights[name] = self.settings.adapted(coefficient, entropy)

    def load(self, weights: Mapping[str, tuple[float, float]]) -> None:
        """Restore each policy's coefficient and weight; without a target these are the configured ones."""
        if self.settings.target is not None:
            self.weights |= {name: pair for name, pair in weights.items() if name in self.weights}
