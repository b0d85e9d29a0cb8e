"""Credit for decisions that are combined into joint actions and judged together.

K is the number of joint actions in a state, A the number of agents, G the number of each agent's decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards, group_deviations, group_minima
from mrlm_pl.grouping import grouped

CrossReduction = Literal["mean", "sum"]


def tree_returns(rewards: Tensor, parents: Sequence[int], gamma: float) -> Tensor:
    """Return the return [K] of each joint action: its reward plus ``gamma`` times the mean return of its successors.

    Args:
        rewards: [K], rewards of all joint actions of a tree, each after the joint action that it follows.
        parents: [K], index of the joint action that each follows, -1 for those of the root.
        gamma: discount factor from turn to turn.

    >>> tree_returns(torch.tensor([1.0, 2.0, 0.0, 2.0, 3.0, 5.0]), [-1, -1, 0, 0, 1, 1], gamma=0.5)[:2].tolist()
    [1.5, 4.0]
    """
    returns = finite_rewards(rewards).double().tolist()
    sums, counts = [0.0] * len(returns), [0] * len(returns)
    for place in range(len(returns) - 1, -1, -1):
        if counts[place]:
            returns[place] += gamma * sums[place] / counts[place]
        parent = parents[place]
        if parent >= place:
            raise ValueError(f"joint action {place} follows {parent}; one may only follow an earlier one")
        if parent >= 0:
            sums[parent] += returns[place]
            counts[parent] += 1
    return torch.tensor(returns, dtype=torch.float64)


def decision_returns(
    returns: Mapping[tuple[int, ...], float], place: int, partners: int | None = None
) -> dict[int, float]:
    """Return the return of each of an agent's decisions, by index: the mean over the joint actions that contain it.

    If a joint action is missing because it failed, decisions are compared over the same decisions of the others:
    those that every decision with any return was combined with. The result is empty if there are none.

    Args:
        returns: returns by joint action, a tuple of the index of each agent's decision.
        place: position of the agent in the joint actions.
        partners: number of decisions of the others that each decision is combined with if nothing fails: return the sum
            over this number instead of the mean, for comparison with implementations that sum.

    >>> decision_returns({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 4.0}, 0)
    {0: 1.5, 1: 3.5}
    >>> decision_returns({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0}, 0)
    {0: 1.0, 1: 3.0}
    """
    by_partners: dict[tuple[int, ...], dict[int, float]] = {}
    for joint, value in returns.items():
        by_partners.setdefault(joint[:place] + joint[place + 1 :], {})[joint[place]] = value
    numbers = sorted({joint[place] for joint in returns})
    complete = [decided for decided in by_partners.values() if len(decided) == len(numbers)]
    if not complete:
        return {}
    weight = 1 if partners is None else partners
    return {number: weight * math.fsum(decided[number] for decided in complete) / len(complete) for number in numbers}


def counterfactual_advantages(
    returns: Mapping[tuple[int, ...], float], place: int, bonus: Callable[[int], float] = lambda number: 0.0
) -> dict[tuple[int, ...], float]:
    """Return an agent's advantage in each joint action: the return minus its mean over the agent's decisions.

    The decisions of the others are kept, as in COMA (arXiv 1705.08926), whose expectation is replaced by the mean over
    the decisions that were sampled; exactly 0 if these are all worth the same.

    Args:
        returns: returns by joint action, a tuple of the index of each agent's decision.
        place: position of the agent in the joint actions.
        bonus: function that returns the addition to the return of each decision of the agent, by its index.

    >>> square = {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 4.0}
    >>> counterfactual_advantages(square, 0)
    {(0, 0): -1.0, (0, 1): -1.0, (1, 0): 1.0, (1, 1): 1.0}
    """
    values = {joint: value + bonus(joint[place]) for joint, value in returns.items()}
    by_partners = grouped((joint[:place] + joint[place + 1 :], own) for joint, own in values.items())
    advantages = {}
    for joint, own in values.items():
        others = by_partners[joint[:place] + joint[place + 1 :]]
        advantages[joint] = math.fsum(own - other for other in others) / len(others)
    return advantages


def group_max_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return the rewards [B] minus the highest of their group [B].

    This baseline depends on the decision that it judges, so the gradient is biased: use it only to compare with
    implementations that call this ReMax.

    >>> group_max_advantages(torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.zeros(4, dtype=torch.int64)).tolist()
    [-8.0, -7.0, -5.0, 0.0]
    """
    _, index = torch.unique(group_ids, return_inverse=True)
    rewards = finite_rewards(rewards).double()
    return rewards + group_minima(-rewards, index)


def group_scaled_advantages(advantages: Tensor, rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the advantages [B] divided by the (unbiased) standard deviation of their group's rewards.

    Groups of one and groups of equal rewards are unchanged: they have no scale.

    >>> rewards = torch.tensor([1.0, 2.0, 4.0, 9.0])
    >>> scaled = group_scaled_advantages(rewards - 4, rewards, torch.zeros(4, dtype=torch.int64))
    >>> [round(value, 4) for value in scaled.tolist()]
    [-0.8429, -0.562, 0.0, 1.4049]
    """
    of_groups = group_deviations(rewards, group_ids)
    return advantages.double() / torch.where(of_groups.squared_sums > 0, of_groups.stds + eps, 1.0)
