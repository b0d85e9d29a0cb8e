"""Episodes of two agents, ``pro`` and ``con``, whose turns have given numbers of tokens and rewards."""

from __future__ import annotations

from mrlm_pl.episode import Episode, Task, Trajectory, Turn


def trajectory(agent: str, policy: str, *turns: tuple[int, int, dict[str, float], str]) -> Trajectory:
    """A trajectory with turns (step, tokens, components, finish reason)."""
    found, position = [], 1
    for index, tokens, components, finish in turns:
        reward = sum(components.values())
        found.append(Turn(agent, index, position, position + tokens, reward, components, finish, policy, 0, "e"))
        position += tokens
    mask = (False, *[True] * (position - 1))
    return Trajectory(agent, policy, (1,) * position, mask, (0.0,) * position, tuple(found))


def episode(number: int, stop: str, truncated: bool, *rows: Trajectory) -> Episode:
    trajectories = {row.agent: (row,) for row in rows}
    task = Task("duel", "test", number)
    return Episode(str(number), task, str(number), 0, 0, trajectories, stop, truncated, agents=("pro", "con"))
