"""What each agent and each policy earned in an evaluation, how much it said and when its turn came."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrlm_pl.agent_measures import Components, components_of
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.intervals import mean_interval


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
