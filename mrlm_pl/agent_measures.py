"""Reward, components, length, truncation and turn order of episodes by agent and by policy; how episodes ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, Trajectory, Turn

Means = dict[str, tuple[float, float]]
"""(weighted sum, weight) by name; a mean is their quotient, and parts of several ranks add up."""


def means_by_agent(
    episodes: Sequence[Episode], weights: Sequence[float], turns: Iterable[tuple[Turn, Trajectory]]
) -> Means:
    """Return what is measured of each agent and of each policy.

    For an agent, as ``agent/NAME/...``, of the episodes that have it: ``reward`` (its return), ``turns`` and
    ``first_turn`` (the step, from 0, at which it first acts, where it does). For a policy, as ``policy/NAME/...``:
    ``reward``, the mean return of the agents that it plays. For both: ``response_tokens`` per turn and
    ``truncated_turns``, the share of turns cut at ``max_tokens``.

    Args:
        episodes: that did not fail.
        weights: of each episode in a mean over episodes.
        turns: each distinct turn, with its trajectory; each counts once.
    """
    found: Means = {}

    def add(name: str, value: float, weight: float = 1.0) -> None:
        total, count = found.get(name, (0.0, 0.0))
        found[name] = total + value * weight, count + weight

    for episode, weight in zip(episodes, weights, strict=True):
        for agent, own in _by_agent(episode).items():
            for name, value in own.items():
                add(f"agent/{agent}/{name}", value, weight)
            for policy in dict.fromkeys(row.policy for row in episode.trajectories.get(agent, ())):
                add(f"policy/{policy}/reward", own["reward"], weight)
    for turn, row in turns:
        for owner in (f"agent/{turn.agent}", f"policy/{row.policy}"):
            add(f"{owner}/response_tokens", float(turn.stop - turn.start))
            add(f"{owner}/truncated_turns", float(turn.finish_reason == "length"))
    return found


@dataclass
class Components:
    """Weighted sums of reward components.

    An episode without a component counts as 0, so that the means sum to the mean reward. Turns without named components
    have one of the name ``reward``; where others have names, ``reward`` is reported as the whole.

    >>> parts = Components()
    >>> parts.add({"right": 1.0}, 1.0)
    >>> parts.add({}, 1.0)
    >>> parts.means()
    {'right': 0.5}
    """

    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, components: Mapping[str, float], weight: float) -> None:
        """Add the components of one episode."""
        self.weight += weight
        for name, value in components.items():
            self.sums[name] = self.sums.get(name, 0.0) + value * weight

    def plus(self, other: Components) -> Components:
        """Return the sums of both."""
        names = {**self.sums, **other.sums}
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Components(self.weight + other.weight, sums)

    def means(self) -> dict[str, float]:
        """Return the mean of each component that occurred."""
        if not self.weight:
            return {}
        sums = {**self.sums, "reward": math.fsum(self.sums.values())} if "reward" in self.sums else self.sums
        return {name: total / self.weight for name, total in sums.items()}


def components_by_agent(episodes: Sequence[Episode], weights: Sequence[float]) -> dict[str, Components]:
    """Return the components of each agent."""
    found: dict[str, Components] = {}
    for episode, weight in zip(episodes, weights, strict=True):
        for agent in episode.agents or tuple(episode.trajectories):
            turns = (turn for row in episode.trajectories.get(agent, ()) for turn in row.turns)
            found.setdefault(agent, Components()).add(components_of(turns), weight)
    return found


def components_of(turns: Iterable[Turn]) -> dict[str, float]:
    """Return the sum of each reward component over turns."""
    found: dict[str, float] = {}
    for turn in turns:
        for name, value in turn.components.items():
            found[name] = found.get(name, 0.0) + value
    return found


def stop_reasons(episodes: Sequence[Episode], weights: Sequence[float]) -> Components:
    """Return the share of episodes by stop reason, and of those that a limit truncated."""
    found = Components()
    for episode, weight in zip(episodes, weights, strict=True):
        found.add({f"stop/{episode.stop_reason}": 1.0, "truncated_episodes": float(episode.truncated)}, weight)
    return found


def without_sole_owners(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the metrics without those of the only agent and of the only policy, which repeat those of the whole.

    >>> without_sole_owners({"reward": 1.0, "agent/solver/reward": 1.0, "policy/main/reward": 1.0})
    {'reward': 1.0}
    """
    found = dict(metrics)
    for kind in (f"{prefix}agent/", f"{prefix}policy/"):
        own = [name for name in found if name.startswith(kind)]
        if len({name.removeprefix(kind).partition("/")[0] for name in own}) == 1:
            found = {name: value for name, value in found.items() if name not in own}
    return found


def _by_agent(episode: Episode) -> Mapping[str, Mapping[str, float]]:
    """Return the numbers of each agent of one episode; an agent that never acted has a reward of 0 and no turns."""
    found: dict[str, dict[str, float]] = {}
    for agent in episode.agents or tuple(episode.trajectories):
        turns = [turn for row in episode.trajectories.get(agent, ()) for turn in row.turns]
        own = {"reward": math.fsum(turn.reward for turn in turns), "turns": float(len(turns))}
        if turns:
            own["first_turn"] = float(min(turn.index for turn in turns))
        found[agent] = own
    return found
