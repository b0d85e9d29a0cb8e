"""What each agent and each policy earned in an evaluation, how much it said and when its turn came."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.evaluation.intervals import mean_interval


@dataclass(frozen=True)
class Part:
    """The part that an agent, or a policy in all of its seats, had in the episodes.

    Args:
        reward: mean return of an episode; of a policy, of an episode of one of its agents.
        ci95: its 95 % interval by Student's t, clustered by problem; infinite where no spread is known.
        components: mean of each reward component of an episode.
        turns: mean number of turns of an episode.
        first_turn: mean step of the environment, from 0, at which it first acts; NaN where it never does.
        opens: share of the episodes in whose first step it acts.
        response_tokens: mean number of tokens of a turn; NaN without turns.
        truncated_turns: share of the turns that the limit of tokens cut; NaN without turns.
        finish_reasons: number of turns by the reason for which sampling ended.
        stop_reasons: number of episodes in which it acted by the reason for which they ended.
    """

    reward: float
    ci95: tuple[float, float]
    components: Mapping[str, float]
    turns: float
    first_turn: float
    opens: float
    response_tokens: float
    truncated_turns: float
    finish_reasons: Mapping[str, int]
    stop_reasons: Mapping[str, int]


@dataclass(frozen=True)
class _Played:
    """An agent in an episode."""

    agent: str
    policies: tuple[str, ...]
    problem: str
    turns: tuple[Turn, ...]
    opening: int
    stop_reason: str

    @property
    def reward(self) -> float:
        return math.fsum(turn.reward for turn in self.turns)


def parts_by_agent(problems: Mapping[str, Sequence[Episode]]) -> dict[str, Part]:
    """Return the part of each agent, in the order in which they act.

    Args:
        problems: the episodes that did not fail, by the problem that they pose.
    """
    played = _played(problems)
    agents = dict.fromkeys(item.agent for item in played)
    parts = {agent: _part([item for item in played if item.agent == agent]) for agent in agents}
    return dict(sorted(parts.items(), key=lambda item: (math.isnan(item[1].first_turn), item[1].first_turn)))


def parts_by_policy(problems: Mapping[str, Sequence[Episode]]) -> dict[str, Part]:
    """Return the part of each policy, by name; see :func:`parts_by_agent`."""
    played = _played(problems)
    policies = sorted({policy for item in played for policy in item.policies})
    return {name: _part([item for item in played if name in item.policies]) for name in policies}


def seats_of(episodes: Sequence[Episode]) -> dict[str, str]:
    """Return the policy that decided for each agent that acted."""
    return {row.agent: row.policy for episode in episodes for row in episode.rows()}


def _played(problems: Mapping[str, Sequence[Episode]]) -> list[_Played]:
    found = []
    for problem, episodes in problems.items():
        for episode in episodes:
            opening = min((turn.index for row in episode.rows() for turn in row.turns), default=0)
            for agent in episode.agents or tuple(episode.trajectories):
                rows = episode.trajectories.get(agent, ())
                turns = tuple(turn for row in rows for turn in row.turns)
                policies = tuple(dict.fromkeys(row.policy for row in rows))
                found.append(_Played(agent, policies, problem, turns, opening, episode.stop_reason))
    return found


def _part(played: Sequence[_Played]) -> Part:
    turns = [turn for item in played for turn in item.turns]
    acted = [item for item in played if item.turns]
    clusters: dict[str, list[float]] = {}
    for item in played:
        clusters.setdefault(item.problem, []).append(item.reward)
    components = Components()
    for item in played:
        components.add(components_of(item.turns), 1.0)
    return Part(
        reward=_mean([item.reward for item in played]),
        ci95=mean_interval(list(clusters.values())),
        components=components.means(),
        turns=len(turns) / len(played),
        first_turn=_mean([min(turn.index for turn in item.turns) for item in acted]),
        opens=_mean([float(any(turn.index == item.opening for turn in item.turns)) for item in played]),
        response_tokens=_mean([turn.stop - turn.start for turn in turns]),
        truncated_turns=_mean([float(turn.finish_reason == "length") for turn in turns]),
        finish_reasons=dict(Counter(turn.finish_reason for turn in turns)),
        stop_reasons=dict(Counter(item.stop_reason for item in acted)),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


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
