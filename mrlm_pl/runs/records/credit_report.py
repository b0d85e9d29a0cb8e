"""Advantages of recorded turns under two credits, compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, person_of
from mrlm_pl.grouping import grouped

LARGEST = 20
"""Changes in a report."""


@dataclass(frozen=True)
class AdvantageChange:
    """A turn with its recorded and its new advantage."""

    episode: str
    agent: str
    turn: int
    recorded: float
    new: float


@dataclass(frozen=True)
class AgentChange:
    """The advantages of an agent's turns, or of one of them in all episodes, under two credits.

    Args:
        turns: turns with both advantages; a decision that paths of a turn tree share counts once.
        one_sided: turns with one of them alone.
        correlation: Pearson's; None where one side is constant.
        sign_changes: turns whose advantages have opposite signs.
        zero_groups: share of the groups in which all advantages are 0, as recorded and new.
        gradient_cosine: between an agent's gradients under both credits; None without weights, or where one is 0.
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
        algorithm: name of its class.
        episodes: number of episodes that were credited.
        agents: the change of each agent; calls of one sub-agent count together.
        turns: the change of each agent's turns by the number of environment steps before them.
        largest: the largest changes.
        gradient_cosines: between each policy's gradients under both credits, with weights; None where one is 0.
    """

    algorithm: str
    episodes: int
    agents: dict[str, AgentChange]
    turns: dict[str, dict[int, AgentChange]]
    largest: tuple[AdvantageChange, ...]
    gradient_cosines: dict[str, float | None] = field(default_factory=dict)


_Decision = tuple[str, int, tuple[int, str], AdvantageChange | None, bool]
"""Agent, turn, number of the iteration and group, both advantages if it has them, and whether it has one alone."""


class Comparison:
    """Pairs of advantages, recorded and new, of the decisions in episodes."""

    def __init__(self) -> None:
        self._iterations = self._episodes = 0
        self._decisions: list[_Decision] = []

    def add(self, recorded: Sequence[Episode], new: Sequence[Episode]) -> None:
        """Add the episodes of an iteration, in equal order."""
        seen: set[tuple[str, str, str, int]] = set()
        self._iterations += 1
        for old, now in zip(recorded, new, strict=True):
            turns = list(zip(old.turns(), now.turns(), strict=True))
            self._episodes += any(turn.advantage is not None for _, turn in turns)
            for before, after in turns:
                if before.node and old.key_of(before) in seen:
                    continue
                seen.add(old.key_of(before))
                both = None
                if before.advantage is not None and after.advantage is not None:
                    both = AdvantageChange(old.id, before.agent, before.index, before.advantage, after.advantage)
                one_sided = (before.advantage is None) != (after.advantage is None)
                group = self._iterations, old.group
                self._decisions.append((person_of(before.agent), before.index, group, both, one_sided))

    def report(self, algorithm: str) -> RecreditReport:
        """Return the report."""
        decisions_by_agent = grouped((decision[0], decision) for decision in self._decisions)
        turns = {
            agent: {
                turn: _change(decisions)
                for turn, decisions in sorted(grouped((decision[1], decision) for decision in agent_decisions).items())
            }
            for agent, agent_decisions in sorted(decisions_by_agent.items())
        }
        pairs = grouped((agent, both) for agent, _, _, both, _ in self._decisions if both is not None)
        changes = (both for agent_decisions in pairs.values() for both in agent_decisions if both.new != both.recorded)
        largest = sorted(changes, key=lambda change: -abs(change.new - change.recorded))[:LARGEST]
        agents = {agent: _change(decisions_by_agent[agent]) for agent in turns}
        return RecreditReport(algorithm, self._episodes, agents, turns, tuple(largest))


def _change(decisions: Sequence[_Decision]) -> AgentChange:
    pairs = [(group, both) for _, _, group, both, _ in decisions if both is not None]
    sides = [both.recorded for _, both in pairs], [both.new for _, both in pairs]
    varied = all(len(set(side)) > 1 for side in sides)
    groups = grouped(pairs).values()
    recorded, new = (
        sum(all(getattr(both, side) == 0 for both in changes) for changes in groups) / (len(groups) or 1)
        for side in ("recorded", "new")
    )
    return AgentChange(
        len(pairs),
        sum(one_sided for *_, one_sided in decisions),
        statistics.correlation(*sides) if varied else None,
        sum(both.recorded * both.new < 0 for _, both in pairs),
        (recorded, new),
    )
