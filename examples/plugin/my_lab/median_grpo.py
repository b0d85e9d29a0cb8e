"""An algorithm: GRPO with the median of a group as its baseline, and the rule as a function of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient, clipped_losses
from mrlm_pl.losses import Clip
from mrlm_pl.policy import Policy


def median_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return ``(r - median) / (mean |r - median| + 1e-6)`` [N] within each group.

    >>> median_advantages(torch.tensor([0.0, 0.0, 4.0]), torch.tensor([0, 0, 0])).round(decimals=4)
    tensor([0., 0., 3.])
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        deviations = rewards[groups == group] - rewards[groups == group].median()
        advantages[groups == group] = deviations / (deviations.abs().mean() + 1e-6)
    return advantages


class MedianGRPO(PolicyGradient):
    """GRPO with :func:`median_advantages`: one outlier does not move the baseline of its group.

    Args:
        policies, seats, clip, settings: see :class:`~mrlm_pl.algorithms.GRPO`.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        clip: Clip = Clip(),  # noqa: B008 (frozen)
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.clip = clip

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        """Return the trajectories of each policy with their advantages."""
        returns = self.group_returns(episodes, sampling)
        return returns.rows(median_advantages(returns.reward, returns.comparison), self.temperatures(sampling))

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [B, T] of each token, and numbers for the log."""
        return clipped_losses(logp, old_logp, rows, self.clip)
