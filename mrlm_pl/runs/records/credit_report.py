"""Advantages of recorded turns under two credits, compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, TurnKey, base_agent
from mrlm_pl.grouping import grouped

LARGEST = 20
"""Number of changes in a report."""


@dataclass(frozen=True)
class AdvantageChange:
    """A turn with its recorded and its new advantage, NaN for none."""

    episode: str
    agent: str
    turn: int
    recorded: float
    new: float

    @property
    def size(self) -> float:
        """Return the difference without its sign; NaN, which is not compared, without both advantages."""
        return abs(self.new - self.recorded)


@dataclass(frozen=True)
class AgentChange:
    """The advantages of an agent's turns, or of one of them in all episodes, under two credits.

    Args:
        turns: number of turns with both advantages; a decision that paths of a turn tree share counts once.
        one_sided: number of turns with only one of the advantages.
        correlation: Pearson's correlation of the advantages; None if one side is constant.
        sign_changes: number of turns whose advantages have opposite signs.
        zero_groups: fraction of the groups in which all advantages are 0, in the record and now.
        gradient_cosine: cosine between an agent's gradients under both credits; None without weights, or if one is 0.
    """

    turns: int
    one_sided: int
    correlation: float | None
    sign_changes: int
    zero_groups: tuple[float, float]
    gradient_cosine: float | None = None


@dataclass(frozen=True)
class RecreditReport:
    """Recorded episodes under another credit.

    Args:
        algorithm: class name of the algorithm.
        episodes: number of episodes that were credited.
        agents: change of each agent; calls of one sub-agent count together.
        turns: change of each agent's turns by the number of environment steps before them.
        largest: turns with the largest changes.
        gradient_cosines: cosine between each policy's gradients under both credits, with weights; None if one is 0.
    """

    algorithm: str
    episodes: int
    agents: dict[str, AgentChange]
    turns: dict[str, dict[int, AgentChange]]
    largest: tuple[AdvantageChange, ...]
    gradient_cosines: dict[str, float | None] = field(default_factory=dict)


_Decision = tuple[tuple[int, str], AdvantageChange]
"""Number of the iteration and group, and both advantages."""


class Comparison:
    """Pairs of advantages, recorded and new, of the decisions in episodes."""

    def __init__(self) -> None:
        self._iterations = self._episodes = 0
        self._decisions: dict[tuple[int, TurnKey], _Decision] = {}

    def add(self, recorded: Sequence[Episode], new: Sequence[Episode]) -> None:
        """Add the episodes of an iteration, in equal order."""
        self._iterations += 1
        for old, now in zip(recorded, new, strict=True):
            self._episodes += any(turn.advantage is not None for turn in now.turns())
            for turns in zip(old.turns(), now.turns(), strict=True):
                advantages = [math.nan if turn.advantage is None else turn.advantage for turn in turns]
                change = AdvantageChange(old.id, turns[0].agent, turns[0].index, *advantages)
                key = self._iterations, old.key_of(turns[0])  # paths of a turn tree share decisions
                if not all(map(math.isnan, advantages)):  # as those of a frozen policy are
                    self._decisions.setdefault(key, ((self._iterations, old.group), change))

    def report(self, algorithm: str) -> RecreditReport:
        """Return the report."""
        by_agent = grouped((base_agent(decision[1].agent), decision) for decision in self._decisions.values())
        by_turn = {
            agent: grouped((change.turn, (group, change)) for group, change in decisions)
            for agent, decisions in sorted(by_agent.items())
        }
        changes = (change for decisions in by_agent.values() for _, change in decisions if change.size > 0)
        largest = sorted(changes, key=lambda change: -change.size)[:LARGEST]
        return RecreditReport(
            algorithm,
            self._episodes,
            {agent: _change(by_agent[agent]) for agent in by_turn},
            {agent: {turn: _change(turns[turn]) for turn in sorted(turns)} for agent, turns in by_turn.items()},
            tuple(largest),
        )


def _change(decisions: Sequence[_Decision]) -> AgentChange:
    pairs = [(group, (change.recorded, change.new)) for group, change in decisions if change.size >= 0]
    sides = [[pair[side] for _, pair in pairs] for side in (0, 1)]
    groups = grouped(pairs).values()
    recorded, new = (
        sum(not any(pair[side] for pair in members) for members in groups) / (len(groups) or 1) for side in (0, 1)
    )
    return AgentChange(
        len(pairs),
        sum(math.isnan(change.recorded) != math.isnan(change.new) for _, change in decisions),
        statistics.correlation(*sides) if all(len(set(side)) > 1 for side in sides) else None,
        sum(before * after < 0 for _, (before, after) in pairs),
        (recorded, new),
    )
