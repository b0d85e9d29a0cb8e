"""Rewards, lengths and turns by agent and by policy: for the log and for reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.evaluation.intervals import mean_interval
from mrlm_pl.grouping import grouped, summed

Means = dict[str, tuple[float, float]]
"""(weighted sum, weight) by name; a mean is their quotient, and parts of several ranks add up."""


@dataclass(frozen=True)
class _AgentPlay:
    """An agent in an episode; one that never acted has no turns."""

    agent: str
    policies: tuple[str, ...]
    turns: tuple[Turn, ...]

    @property
    def reward(self) -> float:
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def first_turn(self) -> int:
        return min(turn.index for turn in self.turns)

    @property
    def components(self) -> dict[str, float]:
        """The sum of each reward component over the turns."""
        return summed(pair for turn in self.turns for pair in turn.components.items())


def _agent_plays(episode: Episode) -> list[_AgentPlay]:
    plays = []
    for agent in episode.agents or tuple(episode.trajectories):
        rows = episode.trajectories.get(agent, ())
        policies = tuple(dict.fromkeys(row.policy for row in rows))
        plays.append(_AgentPlay(agent, policies, tuple(turn for row in rows for turn in row.turns)))
    return plays


@dataclass
class Components:
    """Weighted sums of reward components.

    An episode without a component counts as 0, so that the means sum to the mean reward. Turns without named components
    have a single one, ``reward``; if other turns have named components, ``reward`` is reported as the total.

    >>> Components.of([({"right": 1.0}, 1.0), ({}, 1.0)]).means()
    {'right': 0.5}
    """

    weight: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, episodes: Iterable[tuple[Mapping[str, float], float]]) -> Components:
        """Return the sums over episodes, given by their components and weights."""
        weighed = list(episodes)
        weighted = ((name, value * weight) for components, weight in weighed for name, value in components.items())
        return cls(sum((weight for _, weight in weighed), 0.0), summed(weighted))

    def plus(self, other: Components) -> Components:
        """Return the sums of both."""
        return Components(self.weight + other.weight, summed([*self.sums.items(), *other.sums.items()]))

    def means(self) -> dict[str, float]:
        """Return the mean of each component that occurred."""
        if not self.weight:
            return {}
        sums = {**self.sums, "reward": math.fsum(self.sums.values())} if "reward" in self.sums else self.sums
        return {name: total / self.weight for name, total in sums.items()}


def components_by_agent(episodes: Sequence[Episode], weights: Sequence[float]) -> dict[str, Components]:
    """Return the components of each agent."""
    weighed = zip(episodes, weights, strict=True)
    by_agent = grouped(
        (play.agent, (play.components, weight)) for episode, weight in weighed for play in _agent_plays(episode)
    )
    return {agent: Components.of(components) for agent, components in by_agent.items()}


def stop_reasons(episodes: Sequence[Episode], weights: Sequence[float]) -> Components:
    """Return the share of episodes by stop reason, and of those that a limit truncated."""
    return Components.of(
        ({f"stop/{episode.stop_reason}": 1.0, "truncated_episodes": float(episode.truncated)}, weight)
        for episode, weight in zip(episodes, weights, strict=True)
    )


def means_by_agent(
    episodes: Sequence[Episode], weights: Sequence[float], turns: Iterable[tuple[Turn, Trajectory]]
) -> Means:
    """Return the metrics of each agent, of each policy, and those of all turns.

    For an agent, as ``agent/NAME/...``, of the episodes that have it: ``reward`` (its return, 0 where it does not act),
    ``turns`` and ``first_turn`` (the step, from 0, at which it first acts, where it does). For a policy, as
    ``policy/NAME/...``: ``reward``, the mean return of the agents in its seats, of the episodes in which they act. For
    both, and without a prefix for all turns: ``response_tokens`` per turn, ``truncated_turns``, the fraction of turns
    truncated at ``max_tokens``, and ``entropy``, the mean ``-log mu`` of the tokens that current weights sampled.

    Args:
        episodes: episodes that did not fail.
        weights: weight of each episode in a mean over episodes.
        turns: distinct turns, each with its trajectory; each counts once.
    """
    means: Means = {}

    def add(name: str, value: float, weight: float = 1.0) -> None:
        total, count = means.get(name, (0.0, 0.0))
        means[name] = total + value, count + weight

    for episode, weight in zip(episodes, weights, strict=True):
        for play in _agent_plays(episode):
            add(f"agent/{play.agent}/reward", play.reward * weight, weight)
            add(f"agent/{play.agent}/turns", len(play.turns) * weight, weight)
            if play.turns:
                add(f"agent/{play.agent}/first_turn", play.first_turn * weight, weight)
            for policy in play.policies:
                add(f"policy/{policy}/reward", play.reward * weight, weight)
    for turn, row in turns:
        surprise, tokens = -math.fsum(row.logprobs[turn.start : turn.stop]), float(turn.stop - turn.start)
        for owner in ("", f"agent/{turn.agent}/", f"policy/{row.policy}/"):
            add(f"{owner}response_tokens", tokens)
            add(f"{owner}truncated_turns", float(turn.finish_reason == "length"))
            if turn.policy == row.policy:  # not of a stale snapshot
                add(f"{owner}entropy", surprise, tokens)
    return means


def without_sole_owners(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the metrics without those of a sole agent or policy, which repeat the metrics of the whole.

    >>> without_sole_owners({"reward": 1.0, "agent/solver/reward": 1.0, "policy/main/reward": 1.0})
    {'reward': 1.0}
    """
    kept = dict(metrics)
    for kind in (f"{prefix}agent/", f"{prefix}policy/"):
        owner_metrics = [name for name in kept if name.startswith(kind)]
        if len({name.removeprefix(kind).partition("/")[0] for name in owner_metrics}) == 1:
            kept = {name: value for name, value in kept.items() if name not in owner_metrics}
    return kept


@dataclass(frozen=True)
class Part:
    """The part of an agent, or of a policy in all of its seats, in the episodes.

    Args:
        reward: mean return of an episode; for a policy, the mean over the episodes of each of its agents.
        ci95: 95 % interval of ``reward`` by Student's t, clustered by problem; infinite if no spread is known.
        components: mean of each reward component of an episode.
        turns: mean number of turns of an episode.
        first_turn: mean step of the environment, from 0, at which the agent first acts; NaN if it never does.
        opens: fraction of the episodes in whose first step the agent acts.
        response_tokens: mean number of tokens of a turn; NaN without turns.
        truncated_turns: fraction of the turns that the token limit truncated; NaN without turns.
        finish_reasons: number of turns by finish reason.
        stop_reasons: number of episodes with actions of the agent, by stop reason.
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


def parts_by_agent(problems: Mapping[str, Sequence[Episode]]) -> dict[str, Part]:
    """Return the part of each agent, in the order in which they act.

    Args:
        problems: episodes that did not fail, by the problem that they pose.
    """
    parts = _parts_by_owner(problems, lambda play: (play.agent,))
    return dict(sorted(parts.items(), key=lambda item: (math.isnan(item[1].first_turn), item[1].first_turn)))


def parts_by_policy(problems: Mapping[str, Sequence[Episode]]) -> dict[str, Part]:
    """Return the part of each policy, by name; see :func:`parts_by_agent`."""
    return dict(sorted(_parts_by_owner(problems, lambda play: play.policies).items()))


def seats_of(episodes: Sequence[Episode]) -> dict[str, str]:
    """Return the policy that decided for each agent that acted."""
    return {row.agent: row.policy for episode in episodes for row in episode.rows()}


def _parts_by_owner(
    problems: Mapping[str, Sequence[Episode]], owners: Callable[[_AgentPlay], Sequence[str]]
) -> dict[str, Part]:
    by_owner = grouped(
        (owner, (problem, episode, play))
        for problem, episodes in problems.items()
        for episode in episodes
        for play in _agent_plays(episode)
        for owner in owners(play)
    )
    return {owner: _summarize(plays) for owner, plays in by_owner.items()}


def _summarize(plays: Sequence[tuple[str, Episode, _AgentPlay]]) -> Part:
    turns = [turn for _, _, play in plays for turn in play.turns]
    acted = [(episode, play) for _, episode, play in plays if play.turns]
    clusters = grouped((problem, play.reward) for problem, _, play in plays)
    opens = sum(play.first_turn == min(turn.index for turn in episode.turns()) for episode, play in acted)
    return Part(
        reward=_mean([play.reward for _, _, play in plays]),
        ci95=mean_interval(list(clusters.values())),
        components=Components.of((play.components, 1.0) for _, _, play in plays).means(),
        turns=len(turns) / len(plays),
        first_turn=_mean([play.first_turn for _, play in acted]),
        opens=opens / len(plays),
        response_tokens=_mean([turn.stop - turn.start for turn in turns]),
        truncated_turns=_mean([float(turn.finish_reason == "length") for turn in turns]),
        finish_reasons=dict(Counter(turn.finish_reason for turn in turns)),
        stop_reasons=dict(Counter(episode.stop_reason for episode, _ in acted)),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
