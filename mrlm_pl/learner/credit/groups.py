"""Episodes by group and by agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mrlm_pl.episode import Episode, Turn


def group_numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    """A number for each group, in the order in which the groups appear."""
    return {group: number for number, group in enumerate(dict.fromkeys(episode.group for episode in episodes))}


def agent_return(episode: Episode, agent: str, turn_bonus: Callable[[Turn], float] | None = None) -> float:
    """What an agent earned in an episode, with ``turn_bonus`` added for each of its turns."""
    earned = episode.rewards()[agent]
    if turn_bonus is None:
        return earned
    return earned + sum(turn_bonus(turn) for row in episode.trajectories[agent] for turn in row.turns)


def acted_episodes(episodes: Sequence[Episode], policy: str) -> int:
    """Return the number of episodes that did not fail and in which a policy sampled tokens."""
    played = (episode for episode in episodes if not episode.failed)
    return sum(any(row.policy == policy and row.num_actions for row in episode.rows()) for episode in played)


def equal_returns(group: Sequence[Episode]) -> bool:
    """Whether every agent's returns are all equal; failures do not count."""
    played = [episode for episode in group if not episode.failed]
    agents = {agent for episode in played for agent in episode.trajectories}
    returns = [{agent_return(e, agent) for e in played if agent in e.trajectories} for agent in agents]
    return all(len(values) < 2 for values in returns)
