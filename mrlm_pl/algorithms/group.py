"""Rows for the learner out of a collection of episodes, credited by comparison within groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlm_pl.advantages import finite_rewards
from mrlm_pl.batch import PolicyBatch, collate_rows
from mrlm_pl.episode import Episode, Trajectory

GroupAdvantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [N], group labels [N]) -> advantages [N]."""


@dataclass
class _Rows:
    trajectories: list[Trajectory] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    prefix_groups: list[int] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


def group_numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    """A number for each group, in the order in which the groups appear."""
    return {group: number for number, group in enumerate(dict.fromkeys(episode.group for episode in episodes))}


def credited_rows(
    episodes: Sequence[Episode], advantage: GroupAdvantage, temperature: Mapping[str, float]
) -> dict[str, PolicyBatch]:
    """Rows of every policy, each with its episode's advantage on all its action tokens.

    An agent's return in an episode is compared with the returns of the same agent in the group's other episodes, so the
    key of a comparison is (group, agent). An agent with several rows (a template that rewrites history) has the same
    advantage on each. Failed episodes are left out; their group shrinks.

    Args:
        episodes: one collection.
        advantage: the group advantage.
        temperature: of the sampling, by policy.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    kept = [episode for episode in episodes if not episode.failed]
    groups = group_numbers(episodes)
    keys: dict[tuple[str, str], int] = {}
    plays = [(number, episode, agent) for number, episode in enumerate(kept) for agent in episode.trajectories]
    labels = [keys.setdefault((episode.group, agent), len(keys)) for _, episode, agent in plays]
    if not plays:
        return {}
    rewards = torch.tensor([episode.rewards()[agent] for _, episode, agent in plays], dtype=torch.float64)
    advantages = advantage(finite_rewards(rewards), torch.tensor(labels)).tolist()

    rows: dict[str, _Rows] = {}
    for (number, episode, agent), label, value in zip(plays, labels, advantages, strict=True):
        for trajectory in episode.trajectories[agent]:
            if trajectory.num_actions:
                table = rows.setdefault(trajectory.policy, _Rows())
                table.trajectories.append(trajectory)
                table.groups.append(groups[episode.group])
                table.prefix_groups.append(label)
                table.episodes.append(number)
                table.advantages.append(value)
    return {
        policy: collate_rows(
            table.trajectories,
            table.groups,
            table.prefix_groups,
            table.episodes,
            temperature=temperature.get(policy, 1.0),
            advantages=table.advantages,
        )
        for policy, table in rows.items()
    }
