"""REINFORCE with a baseline over the whole batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch

from mrlm_pl.advantages import masked_moments
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.settings import FractionBelowOne

logger = logging.getLogger(__name__)


class REINFORCE(PolicyGradient):
    """REINFORCE with a baseline (Williams 1992).

    For an episode with return ``r_i``::

        A_i  = r_i - b
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1). Logged once a
    rollout under ``train/``: ``baseline``, by policy; the rest is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        baseline: ``mean`` of the policy's returns in the rollout, at least two, over all ranks; ``running``, an
            exponential average of these means up to the previous rollout; or ``none``.
        baseline_decay: weight of the past in ``running``.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        baseline: Literal["mean", "running", "none"] = "mean",
        baseline_decay: FractionBelowOne = 0.9,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.baseline, self.baseline_decay = baseline, baseline_decay
        self._running: dict[str, float] = {}

    def with_baselines(self, returns: Returns) -> Returns:
        seats = [self.seat(agent) for agent in returns.agent]
        masks = {name: torch.tensor([seat == name for seat in seats], dtype=torch.bool) for name in self.policies}
        moments_here = {name: masked_moments(returns.reward, mask) for name, mask in masks.items()}
        moments = sum_over_ranks(self.trainer, moments_here)
        baselines = torch.zeros_like(returns.reward)
        for name, mask in masks.items():
            if self.baseline == "mean" and moments[name].count == 1 and name not in self.warned:
                self.warned.add(name)
                logger.warning(
                    "this rollout has a single return of policy %r, which `model.baseline: mean` compares with itself: "
                    "its advantage is 0; raise data.groups or data.group_size, or set model.baseline to running",
                    name,
                )
            baseline = self._next_baseline(name, moments[name].mean, moments[name].count > 0)
            self.metrics.rollout[self.metrics.name("baseline", name)] = baseline
            baselines[mask] = baseline
        return replace(returns, baseline=baselines)

    def _next_baseline(self, name: str, mean: float, observed: bool) -> float:
        """Return a policy's baseline of this rollout; with ``running``, its mean return then enters the average."""
        if self.baseline == "none" or not observed:
            return 0.0
        if self.baseline == "mean":
            return mean
        before = self._running.get(name, mean)
        self._running[name] = self.baseline_decay * before + (1 - self.baseline_decay) * mean
        return before

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "running_baselines": dict(self._running)}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        super().load_progress(progress)
        self._running = dict(progress.get("running_baselines", {}))
