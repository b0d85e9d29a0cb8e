"""Credit for decisions that are combined to joint actions and judged together.

K is the number of joint actions in a state, A of agents, G of each agent's decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards

CrossReduction = Literal["mean", "sum"]


def tree_returns(rewards: Tensor, parents: Sequence[int], gamma: float) -> Tensor:
    """Return [K] of each joint action: its reward and ``gamma`` times the mean return of those that follow it.

    Args:
        rewards: [K], of all joint actions of a tree, in an order in which none comes before the one that it follows.
        parents: [K] the position of the joint action that each follows, -1 for those of the root.
        gamma: discount from turn to turn.

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


def decision_returns(returns: Tensor, decisions: Tensor, reduction: CrossReduction = "mean") -> Tensor:
    """Return of each of an agent's decisions, by number: of all joint actions that contain it, the mean (or the sum).

    Args:
        returns: [K] of the joint actions of a state.
        decisions: [K] int64, number of the agent's decision in each; numbers that do not occur get NaN.
        reduction: ``mean``, or ``sum`` for comparison with implementations that add up.

    >>> decision_returns(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 1, 1])).tolist()
    [1.5, 3.5]
    """
    returns = finite_rewards(returns).double()
    size = int(decisions.max()) + 1 if decisions.numel() else 0
    counts = torch.zeros(size, dtype=torch.float64).index_add(0, decisions, torch.ones_like(returns))
    sums = torch.zeros(size, dtype=torch.float64).index_add(0, decisions, returns)
    unknown = torch.full_like(sums, torch.nan)
    return torch.where(counts > 0, sums / counts if reduction == "mean" else sums, unknown)


def counterfactual_advantages(rewards: Tensor) -> list[Tensor]:
    """What each agent's decision adds to every joint action: the reward minus its mean over that agent's decisions.

    The decisions of the others are kept, as in COMA (arXiv 1705.08926), whose expectation is replaced by the mean over
    the decisions that were sampled.

    Args:
        rewards: [G_0, ..., G_{A-1}] of all joint actions.

    >>> [table.tolist() for table in counterfactual_advantages(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))]
    [[[-1.0, -1.0], [1.0, 1.0]], [[-0.5, 0.5], [-0.5, 0.5]]]
    """
    return [rewards - rewards.mean(dim=agent, keepdim=True) for agent in range(rewards.dim())]


def group_max_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards [B] minus the highest of their group [B].

    That baseline depends on the decision that it judges, so the gradient is biased: only for comparison with
    implementations that call this ReMax.

    >>> group_max_advantages(torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.zeros(4, dtype=torch.int64)).tolist()
    [-8.0, -7.0, -5.0, 0.0]
    """
    rewards = finite_rewards(rewards).double()
    _, index = torch.unique(group_ids, return_inverse=True)
    size = int(index.max()) + 1 if index.numel() else 0
    highest = torch.full((size,), -torch.inf, dtype=torch.float64).scatter_reduce(0, index, rewards, "amax")
    return rewards - highest[index]


def group_scaled_advantages(advantages: Tensor, rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """Advantages [B] divided by the (unbiased) standard deviation of their group's rewards; groups of one stay.

    >>> rewards = torch.tensor([1.0, 2.0, 4.0, 9.0])
    >>> scaled = group_scaled_advantages(rewards - 4, rewards, torch.zeros(4, dtype=torch.int64))
    >>> [round(value, 4) for value in scaled.tolist()]
    [-0.8429, -0.562, 0.0, 1.4049]
    """
    rewards = finite_rewards(rewards).double()
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    means = torch.zeros(len(sizes), dtype=torch.float64).index_add(0, index, rewards) / sizes
    squares = torch.zeros_like(means).index_add(0, index, (rewards - means[index]).square())
    deviations = (squares / (sizes - 1).clamp(min=1)).sqrt()
    scale = torch.where(sizes > 1, deviations + eps, torch.ones_like(deviations))
    return advantages.double() / scale[index]
