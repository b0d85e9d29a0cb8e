"""Counterfactual credit policy optimization: each agent is credited with the return that the team owes to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import NO_MOMENTS, Moments, history_normalized_advantages, masked_moments
from mrlm_pl.episode import Episode
from mrlm_pl.learner.credit.marginal import Absence, Coalitions
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.replay import Rest


class CCPO(PolicyGradient):
    """Counterfactual credit policy optimization (arXiv 2603.21563).

    With the team's return ``R(S)`` when the agents ``S`` decide as in the episode and the others are absent, and the
    mean ``m`` and standard deviation ``s`` of the agent's contributions in all earlier rollouts::

        d_i  = R(all) - R(all without i)
        A_i  = (d_i - m_i) / (s_i + 1e-6)
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    Each episode is replayed once without each agent; see :class:`~mrlm_pl.learner.credit.marginal.Coalitions`. Episodes
    of a group are not compared. If agents decide simultaneously, ``R(all without i)`` does not depend on agent i and
    the expected gradient is that of the team's return, scaled by ``1 / s_i``. Where others react to agent i and their
    recorded messages are replayed, it is biased. The history is per environment and agent, over all ranks, and part of
    the checkpoint. ``train/contribution/ENVIRONMENT/AGENT`` is its mean.

    Args:
        absent, rest: messages of an absent agent, decisions of the others after its first; see
            :data:`mrlm_pl.learner.credit.marginal.Absence`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        absent: Absence = "empty",
        rest: Rest = "replay",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = Coalitions("marginal", absent=absent, rest=rest)
        self.smallest_group = 2 if absent == "other" else 1
        self._history: dict[str, Moments] = {}

    def with_baselines(self, returns: Returns) -> Returns:
        levels = [self._history.get(key, NO_MOMENTS).mean for key in returns.roles]
        return replace(returns, baseline=torch.tensor(levels, dtype=torch.float64))

    def advantages(self, returns: Returns) -> Tensor:
        keys = returns.roles
        normalized = history_normalized_advantages(returns.reward, keys, self._history)
        own = {
            key: masked_moments(returns.reward, torch.tensor([role == key for role in keys]))
            for key in dict.fromkeys(keys)
        }
        for key, moments in sum_over_ranks(self.trainer, own).items():
            self._history[key] = self._history[key] + moments if key in self._history else moments
            self.metrics.rollout[f"train/contribution/{key}"] = self._history[key].mean
        return normalized

    def lacks_signal(self, group: Sequence[Episode]) -> bool:
        return False  # equal contributions differ from the history

    def progress(self) -> dict[str, Any]:
        history = {key: list(astuple(moments)) for key, moments in self._history.items()}
        return {**super().progress(), "contributions": history}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        super().load_progress(progress)
        self._history = {key: Moments(*numbers) for key, numbers in progress.get("contributions", {}).items()}
