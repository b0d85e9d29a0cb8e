"""Multi-agent GRPO for a planner and its sub-agents, which are called a varying number of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, base_agent
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.credit.returns import Batches, Returns, labels
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import PositiveInt


class MGRPO(PolicyGradient):
    """Multi-agent GRPO of a planner and sub-agents (M-GRPO, arXiv 2511.13288).

    An agent ``NAME@K`` is the k-th call of the sub-agent ``NAME``. All calls of a sub-agent in the episodes of a task
    are compared with each other, apart from the planner's episodes. With a call's own return ``s`` and the planner's
    return ``R`` in its episode, for calls without the length penalty of the planner::

        r    = R + s for a call,  R for the planner
        A    = (r - m) / (std + 1e-6)       m, std over the planner's episodes, or over the calls of a sub-agent
        loss = reduce_t( -min(rho_t A, clip(rho_t, 1 - clip.low, 1 + clip.high) A) + beta KL_t )

    ``calls_per_group`` trains on that many calls of each sub-agent for each task, however often it was called: of more,
    some are drawn without replacement; of fewer, all count several times.

    The comparison is biased: its baseline contains calls of the own episode, which share its ``R``, and the number of
    calls that count depends on them. Scores of individual calls keep their direction: their gradient is scaled by
    ``E[n - 1] / E[n]`` for n calls in a group.

    Args:
        planner: agent that calls the others; None is the environment's first agent.
        calls_per_group: number of trajectories of a sub-agent per group; None takes all.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or a planner that is not an agent of the environment.
    """

    smallest_group = 2
    default_loss = "ppo"
    advantage = staticmethod(group_normalized_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        planner: str | None = None,
        calls_per_group: PositiveInt | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.planner, self.calls_per_group = planner, calls_per_group

    def credit(self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]) -> Batches:
        returns, advantages = self._with_advantages(self.returns(episodes, self.turn_bonus(sampling), greedy))
        chosen = self.chosen(returns)
        return returns.take(chosen).rows(advantages[chosen])

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> Returns:
        """Return the returns with the planner's reward added to those of its calls, which are compared together."""
        returns = super().returns(episodes, bonus, greedy)
        added = []
        for episode, agent in zip(returns.episode, returns.agent, strict=True):
            planner = self._planner_of(episode)
            added.append(0.0 if agent == planner else episode.rewards().get(planner, 0.0))
        keys = zip(returns.group.tolist(), map(base_agent, returns.agent), strict=True)
        reward = returns.reward + torch.tensor(added, dtype=torch.float64)
        return replace(returns, reward=reward, comparison=torch.tensor(labels(keys)).long())

    def chosen(self, returns: Returns) -> list[int]:
        """Return the indices of the returns that are trained on; an index may occur several times."""
        if self.calls_per_group is None:
            return list(range(len(returns.agent)))
        members = grouped((label, number) for number, label in enumerate(returns.comparison.tolist()))
        sampled: list[int] = []
        for numbers in members.values():
            episode, agent = returns.episode[numbers[0]], returns.agent[numbers[0]]
            size = len(numbers) if agent == self._planner_of(episode) else self.calls_per_group
            draw = Random(derive_seed("calls", episode.seed, base_agent(agent)))
            sampled += numbers * (size // len(numbers)) + draw.sample(numbers, size % len(numbers))
        return sorted(sampled)

    def _planner_of(self, episode: Episode) -> str:
        agents = episode.agents or tuple(episode.trajectories)
        if self.planner is not None and self.planner not in agents:
            raise ConfigurationError(
                f"planner is {self.planner!r}, but the agents of environment {episode.task.environment!r} are "
                f"{', '.join(agents)}; name one of them, or leave planner out for the first"
            )
        return self.planner or agents[0]
