"""Snapshots of a policy's weights, and how an opponent is drawn from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.lora import is_adapter, merged_state
from mrlm_pl.seeding import keyed_random

Draw = Literal["uniform", "latest", "prioritized"]
INITIAL = 0
"""Number of the snapshot of the weights before the first update."""

_MEMORY = 0.75
_LEAST = 0.1


class SnapshotPool:
    """At most ``size`` snapshots, each numbered by the iterations before it.

    The initial one stays for good; when there are too many, the oldest of the others leaves.

    Args:
        size: maximum number of snapshots, the initial one included.
        draw: ``uniform``; ``latest``: the newest; ``prioritized``: with a weight of ``(1 - w)^2`` for the learner's
            score ``w`` against it (AlphaStar's prioritized fictitious self-play, doi 10.1038/s41586-019-1724-z), but
            never of less than 0.01, so that a beaten snapshot returns now and then and reveals forgetting. ``w``
            is 0.5 before the first game and then a running average, in which the latest collection against that
            snapshot counts a quarter.
    """

    def __init__(self, size: int, draw: Draw) -> None:
        self.size, self.draw = size, draw
        self.snapshots: dict[int, dict[str, Tensor]] = {}
        self.scores: dict[int, float] = {}

    def add(self, number: int, weights: dict[str, Tensor]) -> None:
        """Add a snapshot, and remove another one if there are too many."""
        self.snapshots[number] = weights
        if len(self.snapshots) > self.size:
            oldest = min(set(self.snapshots) - {INITIAL})
            del self.snapshots[oldest]
            self.scores.pop(oldest, None)

    def record_score(self, number: int, score: float) -> None:
        """Record the learner's mean score, from 0 to 1, in the games of an iteration against a snapshot."""
        self.scores[number] = _MEMORY * self.scores.get(number, 0.5) + (1 - _MEMORY) * score

    def draw_number(self, seed: int, iteration: int) -> int:
        """Return the number of an iteration's opponent: a function of the seed, the iteration and the pool."""
        numbers = sorted(self.snapshots)
        if self.draw == "latest":
            return numbers[-1]
        weights = [self.weight(number) for number in numbers]
        return keyed_random("self-play", seed, iteration).choices(numbers, weights)[0]

    def weight(self, number: int) -> float:
        """Return the weight of a snapshot in the draw."""
        return 1.0 if self.draw == "uniform" else max(1.0 - self.scores.get(number, 0.5), _LEAST) ** 2

    def state_dict(self) -> dict[str, Any]:
        """Return the pool with all its weights."""
        return {"snapshots": self.snapshots, "scores": self.scores}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the value of :meth:`state_dict`; beyond ``size`` the oldest snapshots are removed."""
        self.snapshots, self.scores = {}, dict(state["scores"])
        for number, weights in state["snapshots"].items():
            self.add(number, weights)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return copies, on the CPU, of a policy's weights; with LoRA of the adapter alone."""
    return {
        name: weight.detach().cpu().clone()
        for name, weight in policy.model.named_parameters()
        if policy.lora is None or is_adapter(name)
    }


@torch.no_grad()
def load_snapshot(opponent: Policy, weights: Mapping[str, Tensor], learner: Policy) -> None:
    """Make a frozen policy play with the weights of a snapshot of the learner, bit for bit.

    Args:
        opponent: policy that receives the weights; its model has the learner's shape.
        weights: weights that :func:`weights_of` returned, of the learner or of another policy of that shape.
        learner: policy whose adapters are merged into its model's weights; it ends unchanged.

    Raises:
        ConfigurationError: the weights are of another shape.
    """
    if any(is_adapter(name) for name in weights):
        learner_weights = weights_of(learner)
        learner.model.load_state_dict(weights, strict=False)
        weights = merged_state(learner.network)
        learner.model.load_state_dict(learner_weights, strict=False)
    opponent.network.load_state_dict(weights, strict=False)


def check_fit(opponent: Policy, weights: Mapping[str, Tensor], whose: str) -> None:
    """Check that the opponent's model can play with these weights.

    Raises:
        ConfigurationError: a weight is only in one of them, or has another shape.
    """
    shapes = {name: weight.shape for name, weight in opponent.network.named_parameters()}
    wrong = [name for name, shape in shapes.items() if name not in weights or weights[name].shape != shape]
    if wrong:
        raise ConfigurationError(
            f"SelfPlay: {len(wrong)} weights of the opponent's model {opponent.name_or_path!r}, such as {wrong[0]!r}, "
            f"have no counterpart of their shape in {whose}; give both the same model"
        )
