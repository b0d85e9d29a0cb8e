"""Rows for the learner out of a collection of episodes, credited by comparison within groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mrlm_pl.advantages import finite_rewards
from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.learner.batch import PolicyBatch, collate_rows

GroupAdvantage = Callable[[Tensor, Tensor], Tensor]
"""(rewards [N], group labels [N]) -> advantages [N]."""


@dataclass
class _Rows:
    trajectories: list[Trajectory] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    comparisons: list[int] = field(default_factory=list)
    episodes: list[int] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


def group_numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    """A number for each group, in the order in which the groups appear."""
    return {group: number for number, group in enumerate(dict.fromkeys(episode.group for episode in episodes))}


def comparison_keys(episodes: Sequence[Episode]) -> list[tuple[str, str]]:
    """(group, agent) of every agent of every episode that did not fail, in the order in which rewards are compared."""
    return [(episode.group, agent) for episode in episodes if not episode.failed for agent in episode.trajectories]


def agent_turns(episodes: Sequence[Episode]) -> list[int]:
    """How many turns each agent took in each episode that did not fail, in the order of :func:`comparison_keys`."""
    return [
        sum(len(row.turns) for row in rows)
        for episode in episodes
        if not episode.failed
        for rows in episode.trajectories.values()
    ]


def agent_return(episode: Episode, agent: str, turn_bonus: Callable[[Turn], float] | None = None) -> float:
    """What an agent earned in an episode, with ``turn_bonus`` added for each of its turns."""
    earned = episode.rewards()[agent]
    if turn_bonus is None:
        return earned
    return earned + sum(turn_bonus(turn) for row in episode.trajectories[agent] for turn in row.turns)


def collected_returns(
    episodes: Sequence[Episode], agents: Collection[str], turn_bonus: Callable[[Turn], float] | None = None
) -> list[float]:
    """The returns of these agents in all episodes that did not fail."""
    return [
        agent_return(episode, agent, turn_bonus)
        for episode in episodes
        if not episode.failed
        for agent in episode.trajectories
        if agent in agents
    ]


def equal_returns(group: Sequence[Episode]) -> bool:
    """Whether every agent's returns are all equal; failures do not count."""
    played = [episode for episode in group if not episode.failed]
    agents = {agent for episode in played for agent in episode.trajectories}
    returns = [{agent_return(e, agent) for e in played if agent in e.trajectories} for agent in agents]
    return all(len(values) < 2 for values in returns)


def credited_rows(
    episodes: Sequence[Episode],
    advantage: GroupAdvantage,
    temperature: Mapping[str, float],
    turn_bonus: Callable[[Turn], float] | None = None,
) -> dict[str, PolicyBatch]:
    """Rows of every policy, each with its episode's advantage on all its action tokens.

    An agent's return in an episode is compared with the returns of the same agent in the group's other episodes, so the
    key of a comparison is (group, agent). An agent with several rows (a template that rewrites history) has the same
    advantage on each. Failed episodes are left out; their group shrinks.

    Args:
        episodes: one collection.
        advantage: the group advantage.
        temperature: of the sampling, by policy.
        turn_bonus: added to what the environment paid for a turn; None adds nothing.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
    """
    kept = [episode for episode in episodes if not episode.failed]
    groups = group_numbers(episodes)
    numbers: dict[tuple[str, str], int] = {}
    plays = [(number, episode, agent) for number, episode in enumerate(kept) for agent in episode.trajectories]
    labels = [numbers.setdefault(key, len(numbers)) for key in comparison_keys(kept)]
    if not plays:
        return {}
    returns = [agent_return(episode, agent, turn_bonus) for _, episode, agent in plays]
    rewards = torch.tensor(returns, dtype=torch.float64)
    advantages = advantage(finite_rewards(rewards), torch.tensor(labels)).tolist()

    rows: dict[str, _Rows] = {}
    for (number, episode, agent), label, value in zip(plays, labels, advantages, strict=True):
        for trajectory in episode.trajectories[agent]:
            if trajectory.num_actions:
                table = rows.setdefault(trajectory.policy, _Rows())
                table.trajectories.append(trajectory)
                table.groups.append(groups[episode.group])
                table.comparisons.append(label)
                table.episodes.append(number)
                table.advantages.append(value)
    return {
        policy: collate_rows(
            table.trajectories,
            table.groups,
            table.comparisons,
            table.episodes,
            temperature=temperature.get(policy, 1.0),
            advantages=table.advantages,
        )
        for policy, table in rows.items()
    }
