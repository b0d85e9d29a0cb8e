"""Role-conditioned advantage estimation: self-play with a running baseline for each role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mrlm_pl.advantages import role_baselines
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import data_parallel_rank, gather_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.settings import FractionBelowOne


class RAE(PolicyGradient):
    """Policy gradient with role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119), for self-play.

    Each role (agent) of each game (environment) has a baseline ``b``, whichever policy plays it. For an episode in
    which the role earned ``r``::

        A    = r - b[game, role],   then   b[game, role] <- baseline_decay b + (1 - baseline_decay) r
        loss = reduce_t( -A log pi(token_t) + beta KL_t )

    Baselines begin at 0. Every episode that did not fail moves those of its roles once, in the order of the groups and
    of the episodes in a group, over all ranks; so they do not depend on the number of ranks, and all ranks have the
    same. They are part of the checkpoint. There is no ratio and no clip, so use a rollout once (``data.passes`` and
    ``data.minibatches`` 1). Logged once a rollout: ``train/baseline/GAME/ROLE``, after it; the rest is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        baseline_decay: weight of the past in the running baseline.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        baseline_decay: FractionBelowOne = 0.95,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.baseline_decay = baseline_decay
        self._baselines: dict[str, float] = {}

    def with_baselines(self, returns: Returns) -> Returns:
        own = list(zip(returns.roles, returns.reward.tolist(), strict=True))
        by_rank = gather_ranks(self.trainer, own)  # ranks play blocks of groups: their order is that of the groups
        plays = [play for own_plays in by_rank for play in own_plays]
        rewards = torch.tensor([reward for _, reward in plays], dtype=torch.float64)
        baselines, self._baselines = role_baselines(
            rewards, [role for role, _ in plays], self._baselines, decay=self.baseline_decay
        )
        for role, level in self._baselines.items():
            self.metrics.rollout[f"train/baseline/{role}"] = level
        rank, _ = data_parallel_rank(self.trainer)
        start = sum(map(len, by_rank[:rank]))
        return replace(returns, baseline=baselines[start : start + len(own)])

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "role_baselines": dict(self._baselines)}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        super().load_progress(progress)
        self._baselines = dict(progress.get("role_baselines", {}))
