"""REINFORCE with a baseline over the whole batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import finite_rewards
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.groups import collected_returns, comparison_keys
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import policy_gradient_loss
from mrlm_pl.policy import Policy


class REINFORCE(PolicyGradient):
    """REINFORCE with a baseline (Williams 1992).

    For an episode with return ``r_i``::

        A_i  = r_i - b
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a collection once (``data.passes`` and ``data.minibatches`` 1). Logged once a
    collection under ``train/``: ``baseline``, by policy; the rest is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        baseline: ``mean`` of the policy's returns in the collection, over all ranks; ``running``, an exponential
            average of these means that ends with the collection before; or ``none``.
        baseline_decay: weight of the past in ``running``.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    uses_importance_ratio = False

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        baseline: Literal["mean", "running", "none"] = "mean",
        baseline_decay: float = 0.9,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        if baseline not in ("mean", "running", "none") or not 0 <= baseline_decay < 1:
            raise ConfigurationError(
                f"baseline {baseline!r} must be mean, running or none, and baseline_decay {baseline_decay} at least 0 "
                "and below 1"
            )
        self.baseline, self.baseline_decay = baseline, baseline_decay
        self._running: dict[str, float] = {}

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        bonus = self.turn_bonus(sampling)
        levels: dict[str, float] = {}
        for name in self.policies:
            mine = {agent for episode in episodes for agent in episode.trajectories if self.seat(agent) == name}
            returns = finite_rewards(torch.tensor(collected_returns(episodes, mine, bonus), dtype=torch.float64))[None]
            moments = self.global_moments(returns, torch.ones_like(returns, dtype=torch.bool))
            levels[name] = self._level(name, moments.mean, moments.count > 0)
            self.metrics.rollout[self.metrics.name("baseline", name)] = levels[name]
        compared = [levels[self.seat(agent)] for _, agent in comparison_keys(episodes)]
        baselines = torch.tensor(compared, dtype=torch.float64)
        return self.group_credit(episodes, sampling, lambda values, _: values - baselines)

    def _level(self, name: str, mean: float, observed: bool) -> float:
        """The baseline of this collection; the running average takes the collection in afterwards."""
        if self.baseline == "none" or not observed:
            return 0.0
        if self.baseline == "mean":
            return mean
        before = self._running.get(name, mean)
        self._running[name] = self.baseline_decay * before + (1 - self.baseline_decay) * mean
        return before

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}

    def progress(self) -> dict[str, Any]:
        return {"running_baselines": dict(self._running)}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        self._running = dict(progress.get("running_baselines", {}))
