"""Advantages of the REINFORCE family: REINFORCE++, its ``-baseline`` variant, and ReMax.

The two REINFORCE++ functions give the numbers *before* the whitening over the global batch, because that needs the
moments of every piece: ``whiten(x, mask, moments)`` with the sum of every piece's ``masked_moments(x, mask)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.advantages.dr_grpo import group_centered_advantages
from mrlm_pl.advantages.gae import token_gae
from mrlm_pl.advantages.groups import finite_rewards
from mrlm_pl.advantages.tokens import broadcast_to_tokens, rewards_at_last_token
from mrlm_pl.losses.masking import masked_values


def discounted_returns(rewards: Tensor, action_mask: Tensor, *, gamma: float | Tensor = 1.0) -> Tensor:
    """``R_t = r_t + gamma R_{t+1}`` [B, T] over each row's action tokens, 0 outside the mask.

    Args:
        rewards: [B, T], on action tokens; not read elsewhere.
        action_mask: [B, T] bool; environment tokens carry the return through unchanged.
        gamma: discount per action token, or [B, T] (``turn_discounts`` makes it count turns).

    Raises:
        NonFiniteError: a reward of an action token is NaN or infinite.

    >>> rewards, mask = torch.tensor([[1.0, 9.0, 4.0]]), torch.tensor([[True, False, True]])
    >>> discounted_returns(rewards, mask, gamma=0.5).tolist()
    [[3.0, 0.0, 4.0]]
    """
    # Without values, GAE at lambda 1 is the discounted return.
    return token_gae(rewards, torch.zeros_like(rewards), action_mask, gamma=gamma, lam=1.0)[0]


def reinforce_plus_plus_returns(
    rewards: Tensor, kl: Tensor, action_mask: Tensor, *, beta: float, gamma: float | Tensor = 1.0
) -> Tensor:
    """Discounted return [B, T] of ``r - beta kl`` per token, to be whitened over the global batch.

    Args:
        rewards: [B], placed on the last action token.
        kl: [B, T], ``kl_k1(old_logp, ref_logp, action_mask)``.
        action_mask: [B, T] bool.
        beta: weight of the KL penalty, in units of reward.
        gamma: see ``discounted_returns``.

    Raises:
        NonFiniteError: a reward, or the KL of an action token, is NaN or infinite.

    Source: arXiv 2501.03262.

    >>> mask, kl = torch.tensor([[True, True]]), torch.tensor([[1.0, 2.0]])
    >>> reinforce_plus_plus_returns(torch.tensor([1.0]), kl, mask, beta=0.25).tolist()  # 1 - .5, then - .25
    [[0.25, 0.5]]
    """
    token_rewards = rewards_at_last_token(finite_rewards(rewards), action_mask)
    return discounted_returns(token_rewards - beta * masked_values(kl.detach(), action_mask), action_mask, gamma=gamma)


def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, action_mask: Tensor) -> Tensor:
    """``r - m`` of the group on every action token [B, T], to be whitened over the global batch.

    Args:
        rewards, group_ids: [B].
        action_mask: [B, T] bool.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2501.03262.

    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> reinforce_plus_plus_baseline(torch.tensor([1.0, 0.0]), torch.tensor([5, 5]), mask).tolist()
    [[0.5, 0.5], [-0.5, 0.0]]
    """
    return broadcast_to_tokens(group_centered_advantages(rewards, group_ids), action_mask)


def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """``r`` minus the reward of the greedy rollout of the same task [B].

    Args:
        rewards: [B], of the sampled episodes.
        greedy_rewards: [B], of the greedily decoded episode of each row's task.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2310.10505.

    >>> remax_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0.25, 0.25])).tolist()
    [0.75, -0.25]
    """
    if rewards.shape != greedy_rewards.shape:
        raise ValueError(
            f"greedy_rewards has shape {tuple(greedy_rewards.shape)}; give one per reward, {list(rewards.shape)}"
        )
    return finite_rewards(rewards) - finite_rewards(greedy_rewards)
