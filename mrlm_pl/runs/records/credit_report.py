"""Advantages of recorded turns under two credits, compared."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from mrlm_pl.episode import Episode, person_of

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


_Part = tuple[str, int | None]
"""An agent, and one of its turns or None for all."""


class Comparison:
    """Pairs of advantages, recorded and new, by agent, and by agent and turn."""

    def __init__(self) -> None:
        self._episodes = 0
        self._pairs: dict[_Part, list[AdvantageChange]] = defaultdict(list)
        self._one_sided: Counter[_Part] = Counter()
        self._zero: dict[_Part, list[tuple[bool, bool]]] = defaultdict(list)

    def add(self, recorded: Sequence[Episode], new: Sequence[Episode]) -> None:
        """Add the episodes of an iteration, in equal order."""
        seen: set[tuple[str, str, str, int]] = set()
        groups: dict[tuple[_Part, str], tuple[bool, bool]] = {}
        for old, now in zip(recorded, new, strict=True):
            turns = list(zip(old.turns(), now.turns(), strict=True))
            self._episodes += any(turn.advantage is not None for _, turn in turns)
            for before, after in turns:
                decision = (old.group, before.node, before.agent, before.sample)
                if before.node and decision in seen:
                    continue
                seen.add(decision)
                agent = person_of(before.agent)
                parts: tuple[_Part, ...] = ((agent, None), (agent, before.index))
                for part in parts:
                    if before.advantage is None or after.advantage is None:
                        self._one_sided[part] += (before.advantage is None) != (after.advantage is None)
                        continue
                    change = AdvantageChange(old.id, before.agent, before.index, before.advantage, after.advantage)
                    self._pairs[part].append(change)
                    zero = groups.get((part, old.group), (True, True))
                    groups[part, old.group] = zero[0] and change.recorded == 0, zero[1] and change.new == 0
        for (part, _), both in groups.items():
            self._zero[part].append(both)

    def report(self, algorithm: str) -> RecreditReport:
        """Return the report."""
        agents: dict[str, AgentChange] = {}
        turns: dict[str, dict[int, AgentChange]] = {}
        for agent, turn in sorted({*self._pairs, *self._one_sided}, key=lambda part: (part[0], part[1] or 0)):
            change = self._change((agent, turn))
            if turn is None:
                agents[agent] = change
            else:
                turns.setdefault(agent, {})[turn] = change
        changes = (change for (_, turn), found in self._pairs.items() if turn is None for change in found)
        every = (change for change in changes if change.new != change.recorded)
        largest = sorted(every, key=lambda change: -abs(change.new - change.recorded))[:LARGEST]
        return RecreditReport(algorithm, self._episodes, agents, turns, tuple(largest))

    def _change(self, part: _Part) -> AgentChange:
        changes, zero = self._pairs[part], self._zero[part] or [(False, False)]
        sides = [change.recorded for change in changes], [change.new for change in changes]
        varied = all(len(set(side)) > 1 for side in sides)
        return AgentChange(
            len(changes),
            self._one_sided[part],
            statistics.correlation(*sides) if varied else None,
            sum(change.recorded * change.new < 0 for change in changes),
            (math.fsum(pair[0] for pair in zero) / len(zero), math.fsum(pair[1] for pair in zero) / len(zero)),
        )
