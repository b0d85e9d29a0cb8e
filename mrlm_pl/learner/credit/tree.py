"""The returns of joint actions in a turn tree, and the decisions that they value."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from mrlm_pl.advantages import tree_returns
from mrlm_pl.episode import Trajectory, Turn
from mrlm_pl.rollout.turn_tree import JointAction, TurnTree


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


def decisions_of(tree: TurnTree) -> list[Decision]:
    """Return the decisions of a tree, not valued yet."""
    return [
        Decision(tree.paths[0].group, node, turn.index, agent, number, _only(row, turn), turn)
        for (node, agent, number), (turn, row) in tree.decisions.items()
    ]


def joint_returns(tree: TurnTree, agent: str | None, gamma: float) -> dict[str, float]:
    """Return the return of each joint action that did not fail, by name.

    A joint action whose continuations all failed has none either, unless ``gamma`` is 0: what it leads to is unknown.

    Args:
        tree: of a group.
        agent: whose rewards count; None is the mean over the agents.
        gamma: discount factor, from step to step.
    """
    children = tree.children()
    known: dict[str, bool] = {}
    for name in reversed(list(tree.actions)):  # children come after their parent
        after = children.get(name, []) if gamma else []
        known[name] = tree.actions[name].rewards is not None and (not after or any(known[key] for key in after))
    kept = [name for name in tree.actions if known[name]]
    places = {name: place for place, name in enumerate(kept)}
    paid = [_reward(tree, tree.actions[name], agent) for name in kept]
    parents = [places.get(tree.actions[name].node, -1) for name in kept]
    returns = tree_returns(torch.tensor(paid, dtype=torch.float64), parents, gamma)
    return dict(zip(kept, returns.tolist(), strict=True))


def reach_of(tree: TurnTree) -> dict[str, float]:
    """Return the probability of each state when joint actions of a state are equally likely."""
    found = {action.node: 1.0 for action in tree.actions.values() if action.node not in tree.actions}
    children = tree.children()
    for name, action in tree.actions.items():
        if name in children:
            found[name] = found[action.node] / len(children[action.node])
    return found


def _reward(tree: TurnTree, action: JointAction, agent: str | None) -> float:
    assert action.rewards is not None
    if agent is None:
        return math.fsum(action.rewards.values()) / tree.team_size
    return action.rewards.get(agent, 0.0)


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
