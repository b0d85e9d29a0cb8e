"""Statistics of rewards inside groups: the episodes of one task that are compared with each other.

Rows of a group need not be adjacent, and labels are arbitrary integers. B is the number of rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mrlm_pl.errors import NonFiniteError
from mrlm_pl.losses.masking import check_shape


class GroupDeviations(NamedTuple):
    """Per row, [B] fp64: reward minus the group's mean, the group's counted size, and its sum of squared deviations."""

    deviations: Tensor
    sizes: Tensor
    squared_sums: Tensor

    @property
    def stds(self) -> Tensor:
        """Unbiased standard deviation of each row's group, 0 in a group of one."""
        return (self.squared_sums / (self.sizes - 1).clamp(min=1)).sqrt()


def group_deviations(rewards: Tensor, group_ids: Tensor, counts: Tensor | None = None) -> GroupDeviations:
    """Return the deviation of each reward from its group's mean, exactly 0 where a group's rewards are all equal.

    Args:
        rewards: [B], one for each row.
        group_ids: [B] int64, equal for the rows of a group.
        counts: [B] int64, number of times that each reward counts, at least once; None counts each once.

    Raises:
        NonFiniteError: a reward is NaN or infinite; the message names its row.
        ValueError: ``rewards`` and ``group_ids`` are not of one shape [B].

    Warns:
        RuntimeWarning: a group has one member, which has nothing to be compared with and so a deviation of 0.

    >>> group_deviations(torch.tensor([1.0, 0.1, 3.0, 0.1]), torch.tensor([4, 2, 4, 2])).deviations.tolist()
    [-1.0, 0.0, 1.0, 0.0]
    >>> group_deviations(torch.tensor([1.0, 4.0]), torch.tensor([0, 0]), torch.tensor([2, 1])).deviations.tolist()
    [-1.0, 2.0]
    """
    rewards = finite_rewards(rewards)
    index = _group_index(rewards, group_ids)
    if bool((torch.bincount(index) == 1).any()):
        warnings.warn(
            "a group of one episode has advantage 0 and gives no signal: sample at least two episodes for each task, "
            "and more where an agent does not act in all of them",
            RuntimeWarning,
            stacklevel=3,
        )
    # Measured from the group's minimum: equal rewards then differ by exactly 0, which their rounded mean would spoil.
    heights = rewards.double() - group_minima(rewards.double(), index)
    weights = torch.ones_like(heights) if counts is None else counts.double()
    counted = group_sums(weights, index)
    deviations = heights - group_sums(weights * heights, index) / counted
    return GroupDeviations(deviations, counted, group_sums(weights * deviations.square(), index))


def group_means(rewards: Tensor, group_ids: Tensor, counts: Tensor | None = None, *, others: bool = False) -> Tensor:
    """Return the mean reward [B] fp64 of each row's group: the baseline of a comparison in groups.

    Args:
        rewards: [B], one for each row.
        group_ids: [B] int64, equal for the rows of a group.
        counts: [B] int64, number of times that each reward counts; None counts each once.
        others: leave out the row's own reward, except in a group of one.

    >>> group_means(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64)).tolist()
    [3.0, 3.0, 3.0]
    >>> group_means(torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1]), others=True).tolist()
    [4.0, 3.5, 1.5, 5.0]
    """
    rewards, index = rewards.double(), _group_index(rewards, group_ids)
    weights = torch.ones_like(rewards) if counts is None else counts.double()
    totals, counted = group_sums(weights * rewards, index), group_sums(weights, index)
    alone = counted <= weights
    return torch.where(alone, rewards, (totals - rewards) / (counted - 1)) if others else totals / counted


def finite_rewards(rewards: Tensor) -> Tensor:
    """Return ``rewards`` [B] in fp32 (fp64 stays), after a check that they are finite numbers, one per row.

    Raises:
        NonFiniteError: names the first row whose reward is NaN or infinite.
        ValueError: ``rewards`` is not one-dimensional.

    >>> finite_rewards(torch.tensor([0.0, float("nan")]))
    Traceback (most recent call last):
    ...
    mrlm_pl.errors.NonFiniteError: the reward of row 1 is nan: a failed episode belongs out of the batch, not in it
    """
    if rewards.ndim != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give one number per row, [B]")
    bad_rows = (~rewards.isfinite()).nonzero()
    if bad_rows.numel():
        row = int(bad_rows[0])
        raise NonFiniteError(
            f"the reward of row {row} is {rewards[row].item()}: a failed episode belongs out of the batch, not in it"
        )
    return rewards.to(torch.promote_types(rewards.dtype, torch.float32))


def _group_index(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return the number of each row's group, counted from 0."""
    if group_ids.shape != rewards.shape:
        raise ValueError(f"group_ids has shape {tuple(group_ids.shape)}; it must be {tuple(rewards.shape)}")
    return torch.unique(group_ids, return_inverse=True)[1]


def group_sums(values: Tensor, index: Tensor) -> Tensor:
    """Return the sum, of the shape of the values [B, ...], over all values with the same index [B]."""
    size = int(index.max()) + 1 if len(index) else 0
    return values.new_zeros(size, *values.shape[1:]).index_add(0, index, values)[index]


def group_minima(values: Tensor, index: Tensor) -> Tensor:
    """Return the lowest, of the shape of the values [B, ...], of all values with the same index [B]."""
    size = int(index.max()) + 1 if len(index) else 0
    index = index.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    lowest = values.new_full((size, *values.shape[1:]), torch.inf).scatter_reduce(0, index, values, "amin")
    return lowest.gather(0, index)


def group_centered_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return ``r - m`` [B] with the mean ``m`` of each row's group; 0 in a group of one or of equal rewards.

    Dr.GRPO pairs it with the ``constant_length`` reduction, so that neither a group's spread nor a response's length
    changes the weight of a token.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2503.20783.

    >>> group_centered_advantages(torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.zeros(4, dtype=torch.int64)).tolist()
    [-3.0, -2.0, 0.0, 5.0]
    """
    return group_deviations(rewards, group_ids).deviations.to(torch.promote_types(rewards.dtype, torch.float32))


def group_normalized_advantages(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return ``(r - m) / (s + eps)`` [B], with mean ``m`` and unbiased standard deviation ``s`` of each row's group.

    A group of one, or of equal rewards, has exactly 0.

    Args:
        rewards: [B], one for each row.
        group_ids: [B] int64, equal for the rows of a group, which need not be adjacent.
        eps: constant added to ``s``, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2402.03300.

    >>> group_normalized_advantages(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    tensor([ 0.5000,  0.5000,  0.5000, -1.5000])
    """
    of_groups = group_deviations(rewards, group_ids)
    return (of_groups.deviations / (of_groups.stds + eps)).to(torch.promote_types(rewards.dtype, torch.float32))


def component_normalized_advantages(
    components: Tensor, group_ids: Tensor, weights: Sequence[float] | None = None, *, eps: float = 1e-6
) -> Tensor:
    """Return the weighted sum [N] fp64 of the components' advantages, each normalized within its group.

    Components of different scale or frequency count alike, and two episodes with the same total but other components
    differ. Whiten the result over the batch (:func:`mrlm_pl.advantages.whiten`): its scale depends on the number of
    components.

    Args:
        components: [N, K], reward components of N episodes.
        group_ids: [N] int64, equal for the episodes of a group.
        weights: weights of the K components; None weighs all equally.
        eps: constant added to each standard deviation, in units of reward.

    Raises:
        ValueError: there is not one weight for each component.
        NonFiniteError: a component is NaN or infinite.

    Source: arXiv 2601.05242 (GDPO).

    >>> components = torch.tensor([[2.0, 0.0], [0.0, 20.0], [1.0, 10.0]])  # normalized: 1, -1, 0 and -1, 1, 0
    >>> one_group = torch.zeros(3, dtype=torch.int64)
    >>> [round(x, 4) for x in component_normalized_advantages(components, one_group, [2.0, 1.0]).tolist()]
    [1.0, -1.0, 0.0]
    """
    if weights is not None and len(weights) != components.shape[1]:
        raise ValueError(f"{len(weights)} weights for {components.shape[1]} reward components; give one for each")
    parts = [group_normalized_advantages(part, group_ids, eps=eps).double() for part in components.double().T]
    factors = weights or [1.0] * len(parts)
    return torch.stack([factor * part for factor, part in zip(factors, parts, strict=True)]).sum(0)


def leave_one_out_advantages(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return ``r`` minus the mean of the other rewards of its group [B], which is ``G / (G - 1) (r - m)``.

    Exactly 0 in a group of one or of equal rewards.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2402.14740.

    >>> leave_one_out_advantages(torch.tensor([1.0, 2.0, 6.0]), torch.zeros(3, dtype=torch.int64)).tolist()
    [-3.0, -1.5, 4.5]
    """
    deviations, sizes, _ = group_deviations(rewards, group_ids)
    return (deviations * sizes / (sizes - 1).clamp(min=1)).to(torch.promote_types(rewards.dtype, torch.float32))


def step_normalized_advantages(rewards: Tensor, group_ids: Tensor, steps: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return ``(r - m_k) / (s_k + eps)`` [B], both over all steps of agent k in the group, ``s_k`` unbiased.

    Each return counts once for every step that the agent took in its episode; with equally many steps everywhere the
    mean is GRPO's. The advantage is exactly 0 for equal returns, and for an episode in which the agent took no step.

    Args:
        rewards: [B], the agent's return in each episode.
        group_ids: [B] int64, equal for the episodes of a task and an agent.
        steps: [B] int64, turns of the agent in the episode.
        eps: constant added to ``s_k``, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2602.08847.

    >>> steps = torch.tensor([3, 1])  # returns 1, 1, 1, 0 of four steps: mean 3/4, standard deviation 1/2
    >>> step_normalized_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), steps)
    tensor([ 0.5000, -1.5000])
    """
    rewards = finite_rewards(rewards)
    acted = (steps > 0).nonzero().flatten()
    of_groups = group_deviations(rewards[acted], group_ids[acted], steps[acted])
    advantages = torch.zeros_like(rewards)
    advantages[acted] = (of_groups.deviations / (of_groups.stds + eps)).to(rewards.dtype)
    return advantages


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Return ``r`` minus the reward of the greedy rollout of the same task [B].

    Args:
        rewards: [B], rewards of the sampled episodes.
        greedy_rewards: [B], reward of the greedily decoded episode of each row's task.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2310.10505.

    >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25])).tolist()
    [0.75, -0.25]
    """
    check_shape(rewards.shape, greedy_rewards=greedy_rewards)
    return finite_rewards(rewards) - finite_rewards(greedy_rewards)
