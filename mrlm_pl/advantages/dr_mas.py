"""Dr.MAS's advantage: normalized over the agent's own steps in the task's group."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards, group_deviations


def step_normalized_advantages(rewards: Tensor, group_ids: Tensor, steps: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``(r - m_k) / (s_k + eps)`` [B], with ``m_k`` and the unbiased ``s_k`` over all steps of agent k in the group.

    Each return counts once for every step that the agent took in its episode; with equally many steps everywhere the
    mean is GRPO's. Equal returns have exactly 0, and so has an episode in which the agent took no step.

    Args:
        rewards: [B], what the agent earned in an episode.
        group_ids: [B] int64, equal for the episodes of a task and an agent.
        steps: [B] int64, turns of the agent in the episode.
        eps: added to ``s_k``, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2602.08847.

    >>> steps = torch.tensor([3, 1])  # returns 1, 1, 1, 0 of four steps: mean 3/4, standard deviation 1/2
    >>> step_normalized_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64), steps)
    tensor([ 0.5000, -1.5000])
    """
    rewards = finite_rewards(rewards)
    acted = (steps > 0).nonzero().flatten()
    deviations, counted, squared_sums = group_deviations(rewards[acted], group_ids[acted], steps[acted])
    normalized = deviations / ((squared_sums / (counted - 1).clamp(min=1)).sqrt() + eps)
    advantages = torch.zeros_like(rewards)
    advantages[acted] = normalized.to(rewards.dtype)
    return advantages
