"""Episodes by group and by agent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

import torch
from torch import Tensor

from mrlm_pl.episode import Episode, Turn


def labels(keys: Iterable[Hashable]) -> list[int]:
    """Return a number for each key, equal for equal keys, in the order in which they appear.

    >>> labels("abac")
    [0, 1, 0, 2]
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def group_numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return a number for each group, in the order in which the groups appear."""
    groups = [episode.group for episode in episodes]
    return dict(zip(groups, labels(groups), strict=True))


def task_types(groups: Tensor, episodes: Sequence[Episode], names: Sequence[str]) -> Tensor:
    """Return the task type [B] of rows: the place of their episode's environment among the names.

    Args:
        groups: [B] group numbers.
        episodes: one rollout.
        names: the environments of the run.
    """
    environments = {episode.group: episode.task.environment for episode in episodes}
    return torch.tensor([names.index(name) for name in environments.values()], device=groups.device)[groups]


def agent_return(episode: Episode, agent: str, turn_bonus: Callable[[Turn], float] | None = None) -> float:
    """Return an agent's return in an episode, with ``turn_bonus`` added for each of its turns."""
    earned = episode.rewards()[agent]
    if turn_bonus is None:
        return earned
    return earned + sum(turn_bonus(turn) for row in episode.trajectories[agent] for turn in row.turns)


def acted_episodes(episodes: Sequence[Episode], policy: str) -> int:
    """Return the number of episodes that did not fail and in which a policy sampled tokens."""
    played = (episode for episode in episodes if not episode.failed)
    return sum(any(row.policy == policy and row.num_actions for row in episode.rows()) for episode in played)


def equal_returns(group: Sequence[Episode]) -> bool:
    """Return whether every agent's returns are all equal; failures do not count."""
    played = [episode for episode in group if not episode.failed]
    agents = {agent for episode in played for agent in episode.trajectories}
    returns = [{agent_return(e, agent) for e in played if agent in e.trajectories} for agent in agents]
    return all(len(values) < 2 for values in returns)
