"""The turn tree of a group as a record: states, the decisions in them, and the joint actions between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mrlm_pl.episode import Episode, Trajectory, Turn

THRESHOLD_STOP, UNEXPANDED_STOP = TREE_STOPS = ("reward_threshold", "not_expanded")
"""Stop reasons of paths that the tree ended, not the environment."""


@dataclass(frozen=True)
class JointAction:
    """One decision of each agent that was due in a state.

    Attributes:
        node: the state, which is its parent in the tree.
        depth: steps of the environment that led to the state.
        decisions: number of each agent's decision.
        path: the first episode that has it.
        failed: whether its step failed.
    """

    node: str
    depth: int
    decisions: Mapping[str, int]
    path: Episode
    failed: bool

    @property
    def rewards(self) -> Mapping[str, float] | None:
        """The rewards of the step by agent; None when it failed."""
        return None if self.failed else self.path.step_rewards[self.depth]


@dataclass(frozen=True)
class TurnTree:
    """A group of episodes that branch: every path from the root to a leaf is an episode.

    Attributes:
        paths: the episodes. Turns that they share have the same ``node`` and ``sample`` in all of them.
        actions: joint actions by the id of the state that they lead to, or of the path that they end; a parent comes
            before its children.
        decisions: the turn, and the first row that has it, by (state, agent, number).
    """

    paths: tuple[Episode, ...]
    actions: Mapping[str, JointAction]
    decisions: Mapping[tuple[str, str, int], tuple[Turn, Trajectory]]

    @classmethod
    def of(cls, paths: Sequence[Episode]) -> TurnTree:
        """Return the tree of a group's paths."""
        actions: dict[str, JointAction] = {}
        decisions: dict[tuple[str, str, int], tuple[Turn, Trajectory]] = {}
        for path in paths:
            steps = decided(path)
            states = [next(iter(made.values()))[0].node for made in steps.values()]
            for (step, made), node, leads_to in zip(steps.items(), states, [*states[1:], path.id], strict=True):
                if leads_to in actions:
                    continue
                numbers = {agent: turn.sample for agent, (turn, _) in made.items()}
                # The last step of a failed path has no outcome, whatever rewards it has.
                failed = leads_to == path.id and path.failed
                actions[leads_to] = JointAction(node, step, numbers, path, failed)
                for agent, (turn, row) in made.items():
                    decisions.setdefault((node, agent, turn.sample), (turn, row))
        return cls(tuple(paths), actions, decisions)

    @property
    def team_size(self) -> int:
        """Number of agents that a mean over the agents is over."""
        return max(path.team_size for path in self.paths)

    def children(self) -> dict[str, list[str]]:
        """Return the names of each state's joint actions."""
        found: dict[str, list[str]] = {}
        for name, action in self.actions.items():
            found.setdefault(action.node, []).append(name)
        return found


def decided(episode: Episode) -> dict[int, dict[str, tuple[Turn, Trajectory]]]:
    """Return the turn of each agent, with its row, by step in order."""
    found: dict[int, dict[str, tuple[Turn, Trajectory]]] = {}
    for row in episode.rows():
        for turn in row.turns:
            found.setdefault(turn.index, {})[turn.agent] = (turn, row)
    return dict(sorted(found.items()))


def turn_trees(episodes: Sequence[Episode]) -> dict[str, TurnTree]:
    """Return the turn tree of each group."""
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return {group: TurnTree.of(paths) for group, paths in groups.items()}


def branches(episode: Episode) -> bool:
    """Whether an episode is a path of a turn tree."""
    return any(turn.node for row in episode.rows() for turn in row.turns)


def distinct_turns(episodes: Sequence[Episode]) -> list[tuple[Turn, Trajectory]]:
    """Return every decision once, with a row that has it; paths of a turn tree share some."""
    plain = [episode for episode in episodes if not branches(episode)]
    found = [(turn, row) for episode in plain for row in episode.rows() for turn in row.turns]
    for tree in turn_trees([episode for episode in episodes if branches(episode)]).values():
        found += tree.decisions.values()
    return found


def path_weights(episodes: Sequence[Episode]) -> list[float]:
    """Return the probability of each episode when joint actions of a state are equally likely; 1 outside turn trees.

    Without them a mean over the paths would count those most that branch most. Paths that the tree did not expand,
    because another was better, have 0: their outcome is unknown.
    """
    expanded = [episode for episode in episodes if episode.stop_reason != UNEXPANDED_STOP and branches(episode)]
    weights: dict[tuple[str, str], float] = {}
    for tree in turn_trees(expanded).values():
        children = tree.children()
        for path in tree.paths:
            states = [next(iter(made.values()))[0].node for made in decided(path).values()]
            weights[path.group, path.id] = math.prod(1 / len(children[node]) for node in states)
    return [
        0.0 if episode.stop_reason == UNEXPANDED_STOP else weights.get((episode.group, episode.id), 1.0)
        for episode in episodes
    ]
