"""Joint actions and decisions of turn trees, and their returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mrlm_pl.advantages import tree_returns
from mrlm_pl.episode import Episode, Trajectory, Turn


@dataclass
class JointAction:
    """One decision of each agent that was due in a state.

    Attributes:
        node: the state.
        depth: how many steps led to it.
        decisions: number of each agent's decision.
        rewards: what the step paid, by agent; None when it failed.
    """

    node: str
    depth: int
    decisions: dict[str, int]
    rewards: Mapping[str, float] | None


@dataclass
class Decision:
    """One decision of one agent, in whatever paths it occurs.

    Attributes:
        group, node, depth, agent, number: the key of a comparison is (group, node, agent).
        row: the token row that ends with it; only its own tokens are actions.
        turn: its turn in that row.
        value: the return of the joint actions that contain it.
        baseline: what that is compared with, where each decision has a baseline of its own.
        summed: number of joint actions that the value is the sum over; 1 where it is their mean.
        reach: the probability of its state when joint actions of a state are equally likely.
    """

    group: str
    node: str
    depth: int
    agent: str
    number: int
    row: Trajectory
    turn: Turn
    value: float = math.nan
    baseline: float = 0.0
    summed: int = 1
    reach: float = 1.0


@dataclass
class Tree:
    """The joint actions and decisions of one group's turn tree; joint actions by the id of the state they lead to."""

    actions: dict[str, JointAction] = field(default_factory=dict)
    decisions: dict[tuple[str, str, int], Decision] = field(default_factory=dict)
    team_size: int = 1

    def add(self, episode: Episode) -> None:
        """Take in a path."""
        self.team_size = max(self.team_size, episode.team_size)
        found: dict[int, dict[str, tuple[Turn, Trajectory]]] = {}
        for row in episode.rows():
            for turn in row.turns:
                found.setdefault(turn.index, {})[turn.agent] = (turn, row)
        steps = sorted(found)
        nodes = [next(iter(found[step].values()))[0].node for step in steps]
        for place, (step, node) in enumerate(zip(steps, nodes, strict=True)):
            last = place + 1 == len(nodes)
            leads_to = episode.id if last else nodes[place + 1]
            if leads_to in self.actions:
                continue
            numbers = {agent: turn.sample for agent, (turn, _) in found[step].items()}
            # The last step of a path that failed was not judged to its end, whatever was booked of it.
            paid = None if last and episode.failed else episode.step_rewards[step]
            self.actions[leads_to] = JointAction(node, step, numbers, paid)
            for agent, (turn, row) in found[step].items():
                key = (node, agent, turn.sample)
                if key not in self.decisions:
                    cut = _only(row, turn)
                    self.decisions[key] = Decision(episode.group, node, step, agent, turn.sample, cut, turn)

    def by_state(self) -> dict[str, list[str]]:
        """The joint actions of each state."""
        found: dict[str, list[str]] = {}
        for name, action in self.actions.items():
            found.setdefault(action.node, []).append(name)
        return found

    def returns(self, agent: str | None, gamma: float) -> dict[str, float]:
        """Return of each joint action that did not fail: of one agent, or, without one, the mean over the agents.

        One whose continuations all failed has none either, unless they do not count: what it leads to is unknown.
        """
        followed = self.by_state()
        known: dict[str, bool] = {}
        for name in reversed(self.actions):  # a path is taken in from its beginning, so what follows comes later
            after = followed.get(name, []) if gamma else []
            known[name] = self.actions[name].rewards is not None and (not after or any(known[key] for key in after))
        kept = [name for name in self.actions if known[name]]
        places = {name: place for place, name in enumerate(kept)}
        rewards = torch.tensor([self._reward(self.actions[name], agent) for name in kept], dtype=torch.float64)
        parents = [places.get(self.actions[name].node, -1) for name in kept]
        return dict(zip(kept, tree_returns(rewards, parents, gamma).tolist(), strict=True))

    def reach(self) -> dict[str, float]:
        """The probability of each state when joint actions of a state are equally likely."""
        found = {action.node: 1.0 for action in self.actions.values() if action.node not in self.actions}
        followed = self.by_state()
        for name, action in self.actions.items():
            if name in followed:
                found[name] = found[action.node] / len(followed[action.node])
        return found

    def _reward(self, action: JointAction, agent: str | None) -> float:
        assert action.rewards is not None
        if agent is None:
            return math.fsum(action.rewards.values()) / self.team_size
        return action.rewards.get(agent, 0.0)


def turn_trees(episodes: Sequence[Episode]) -> dict[str, Tree]:
    """The trees behind a collection's paths, by group."""
    trees: dict[str, Tree] = {}
    for episode in episodes:
        trees.setdefault(episode.group, Tree()).add(episode)
    return trees


def _only(row: Trajectory, turn: Turn) -> Trajectory:
    """The row up to the end of a turn, with no other actions than its."""
    inside = range(turn.start, turn.stop)
    return dataclasses.replace(
        row,
        token_ids=row.token_ids[: turn.stop],
        action_mask=tuple(place in inside for place in range(turn.stop)),
        logprobs=(0.0,) * turn.start + row.logprobs[turn.start : turn.stop],
        turns=(turn,),
    )
