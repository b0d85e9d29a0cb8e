"""Advantages of individual turns: each is compared with turns of the other episodes of its group.

S is the number of turns of one agent each, over all episodes of a rollout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards, group_deviations, group_minima, group_sums

TurnBaseline = Literal["unbiased", "paper"]
"""The baseline of a turn.

- ``unbiased``: from the turn's return, the mean return of the same turn in the *other* episodes; an episode that has
  ended before counts as 0. It does not depend on the own episode, so the expected gradient is the true one, unless
  standard deviations divide it.
- ``paper``: from each turn's reward, the mean over all turns of the group; the differences are then summed. How many
  are summed depends on when the own episode ends: stopping early is rewarded.
"""


def returns_to_go(rewards: Tensor, episodes: Tensor, turns: Tensor, gamma: float = 1.0) -> Tensor:
    """Return [S] fp64: each turn's reward and the discounted rewards of the later turns of its episode.

    Args:
        rewards: [S], rewards of the turns.
        episodes: [S] int64, equal for the turns of one agent in one episode.
        turns: [S] int64, index of the turn within its episode, from 0.
        gamma: discount factor from turn to turn.

    >>> episode, turn = torch.tensor([0, 0, 1, 0]), torch.tensor([0, 1, 0, 2])
    >>> returns_to_go(torch.tensor([1.0, 2.0, 8.0, 4.0]), episode, turn, 0.5).tolist()
    [3.0, 4.0, 8.0, 4.0]
    """
    table, rows = _by_turn(finite_rewards(rewards).double(), episodes, turns)
    for column in range(table.shape[1] - 2, -1, -1):
        table[:, column] += gamma * table[:, column + 1]
    return table[rows, turns]


def turn_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    episodes: Tensor,
    turns: Tensor,
    *,
    gamma: float = 1.0,
    baseline: TurnBaseline = "unbiased",
    normalize: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return the advantage [S] fp64 of each turn; with ``unbiased`` 0 in a group of one episode.

    Args:
        rewards: [S], rewards of the turns.
        group_ids: [S] int64, equal for the turns of one agent in the episodes of one task.
        episodes: [S] int64, equal for the turns of one agent in one episode.
        turns: [S] int64, index of the turn within its episode, from 0.
        gamma: discount factor from turn to turn.
        baseline: baseline of a turn; see :data:`TurnBaseline`.
        normalize: divide by ``s + eps``: with ``unbiased`` the standard deviation of the episodes' whole returns in the
            group, with ``paper`` that of its turns' rewards.
        eps: constant added to the standard deviation, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Sources: arXiv 2402.03300 (``paper``: process supervision), 2402.14740 (leave one out).

    >>> group, episode, turn = torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 0])
    >>> turn_advantages(torch.ones(3), group, episode, turn).tolist()  # 2 - 1, 1 - 0, 1 - 2: longer is better
    [1.0, 1.0, -1.0]
    """
    rewards = finite_rewards(rewards).double()
    if baseline == "paper":
        of_groups = group_deviations(rewards, group_ids)
        deviations = of_groups.deviations / (of_groups.stds + eps) if normalize else of_groups.deviations
        return returns_to_go(deviations, episodes, turns, gamma)
    returns, rows = _by_turn(returns_to_go(rewards, episodes, turns, gamma), episodes, turns)
    groups = torch.zeros(len(returns), dtype=torch.int64).index_copy(0, rows, group_ids)
    _, index = torch.unique(groups, return_inverse=True)
    others = (torch.bincount(index)[index] - 1)[:, None]
    heights = returns - group_minima(returns, index)  # equal returns then differ by exactly 0
    means = (group_sums(heights, index) - heights) / others.clamp(min=1)
    advantages = torch.where(others > 0, heights - means, 0.0)
    if normalize:
        advantages = advantages / (group_deviations(returns[:, 0], groups).stds + eps)[:, None]
    return advantages[rows, turns]


def state_advantages(
    returns: Tensor,
    state_ids: Tensor,
    episodes: Tensor,
    *,
    baseline: TurnBaseline = "unbiased",
    normalize: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Return the advantage [S] fp64 of each turn among the turns taken in the same state.

    Args:
        returns: [S], returns from :func:`returns_to_go`.
        state_ids: [S] int64, equal for turns of one agent, task group and state.
        episodes: [S] int64, equal for the turns of one agent in one episode.
        baseline: ``unbiased`` compares with the turns of *other* episodes, ``paper`` with all, its own included. The
            advantage of a turn without another to compare with is 0.
        normalize: divide by ``s + eps``, with the standard deviation ``s`` over the state's turns.
        eps: constant added to the standard deviation, in units of reward.

    Source: arXiv 2505.10978 (GiGPO), whose normalized form divides by the standard deviation.

    >>> state, episode = torch.tensor([7, 7, 7, 9]), torch.tensor([0, 1, 1, 1])
    >>> state_advantages(torch.tensor([3.0, 1.0, 2.0, 5.0]), state, episode).tolist()  # 3 - 1.5, 1 - 3, 2 - 3
    [1.5, -2.0, -1.0, 0.0]
    >>> state_advantages(torch.tensor([3.0, 1.0, 2.0, 5.0]), state, episode, baseline="paper").tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    _, state = torch.unique(state_ids, return_inverse=True)
    returns = finite_rewards(returns).double()
    heights = returns - group_minima(returns, state)
    visits = torch.unique(torch.stack((state_ids, episodes), -1), dim=0, return_inverse=True)[1]
    sizes, sums = torch.bincount(state)[state], group_sums(heights, state)
    if baseline == "unbiased":
        others = sizes - torch.bincount(visits)[visits]
        means = (sums - group_sums(heights, visits)) / others.clamp(min=1)
    else:
        others, means = sizes - 1, sums / sizes
    advantages = torch.where(others > 0, heights - means, 0.0)
    if normalize:
        squares = group_sums((heights - sums / sizes).square(), state)
        advantages = advantages / ((squares / (sizes - 1).clamp(min=1)).sqrt() + eps)
    return advantages


def leaf_advantages(
    returns: Tensor, common: Tensor, leaves: Tensor, steps: Tensor, *, normalize: bool = False, eps: float = 1e-6
) -> Tensor:
    """Return the advantage [S] fp64 of each turn of leaves that share prefixes.

    The advantage is the leaf's return minus the mean return of the leaves that do not contain the turn: those that left
    its path before it, and those of other trees. It is 0 for a turn that all leaves contain.

    Args:
        returns: [N], returns of the leaves of a task.
        common: [N, N] int64, number of steps from the start that two leaves share.
        leaves: [S] int64, index of each turn's leaf.
        steps: [S] int64, number of steps before the turn.
        normalize: divide by ``s + eps``, with the standard deviation ``s`` of the returns.
        eps: constant added to the standard deviation, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Sources: arXiv 2509.21240 (the trees), 2402.14740 (leave one out).

    >>> common = torch.tensor([[9, 1, 0], [1, 9, 0], [0, 0, 9]])  # leaf 1 leaves leaf 0 after a step; another tree
    >>> leaf, step = torch.tensor([0, 0, 2]), torch.tensor([0, 1, 0])
    >>> leaf_advantages(torch.tensor([4.0, 2.0, 1.0]), common, leaf, step).tolist()  # 4 - 1, 4 - 1.5, 1 - 3
    [3.0, 2.5, -2.0]
    """
    returns = finite_rewards(returns).double()
    without = common[leaves] <= steps[:, None]
    counts = without.sum(-1)
    heights = returns - returns.min()  # equal returns then differ by exactly 0
    means = (without * heights).sum(-1) / counts.clamp(min=1)
    advantages = torch.where(counts > 0, heights[leaves] - means, 0.0)
    spread = heights.std() if len(heights) > 1 else 0.0
    return advantages / (spread + eps) if normalize else advantages


def _by_turn(values: Tensor, episodes: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values [E, K] by episode and turn, 0 if an episode has no such turn, and each value's row [S]."""
    _, rows = torch.unique(episodes, return_inverse=True)
    shape = (int(rows.max()) + 1, int(turns.max()) + 1) if len(rows) else (0, 1)
    return torch.zeros(shape, dtype=torch.float64).index_put((rows, turns), values), rows
