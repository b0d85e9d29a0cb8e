"""Generalized advantage estimation (GAE), over tokens and over transitions. Source: arXiv 1506.02438."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.errors import NonFiniteError
from mrlm_pl.losses.masking import masked_values


def token_gae(
    rewards: Tensor,
    values: Tensor,
    action_mask: Tensor,
    *,
    gamma: float | Tensor = 1.0,
    lam: float = 0.95,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, both [B, T] and 0 outside the mask; each row is its own trajectory.

    ``d_t = r_t + gamma V_{t+1} - V_t``, ``A_t = d_t + gamma lam A_{t+1}``, ``return_t = A_t + V_t``, where ``t + 1`` is
    the row's next *action* token: environment tokens carry V and A through unchanged. Whiten the advantages
    afterwards, never the returns.

    Args:
        rewards: [B, T], rewards on action tokens (a turn's reward on its last one); not read elsewhere.
        values: [B, T], ``V`` before each token; not read outside the mask.
        action_mask: [B, T] bool.
        gamma: discount factor per action token, or [B, T] (``turn_discounts`` makes it count turns).
        lam: GAE's lambda; 0 gives the temporal difference, 1 the Monte-Carlo return.
        bootstrap_values: [B], ``V(s_T)`` of a truncated row, 0 of a terminated one; None if every row terminated.

    Raises:
        NonFiniteError: a reward or value of an action token is NaN or infinite; the message names the row.

    >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    >>> advantages, returns = token_gae(rewards, values, torch.ones(1, 3, dtype=torch.bool))
    >>> [round(x, 5) for x in advantages[0].tolist()], [round(x, 5) for x in returns[0].tolist()]
    ([0.45125, 0.475, 0.5], [0.95125, 0.975, 1.0])
    """
    rewards = _finite("reward", masked_values(rewards.detach(), action_mask))
    values = _finite("value", masked_values(values.detach(), action_mask))
    discounts = torch.as_tensor(gamma, dtype=values.dtype, device=values.device).expand_as(values)
    discounts = masked_values(discounts, action_mask)
    if bootstrap_values is None:
        next_value = values.new_zeros(values.shape[0])
    else:
        next_value = _finite("bootstrap value", bootstrap_values.detach().to(values.dtype))
    next_advantage = torch.zeros_like(next_value)
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        # Outside the mask reward, value and discount are all 0, and so is the advantage.
        acts, value, discount = action_mask[:, t], values[:, t], discounts[:, t]
        advantage = rewards[:, t] + discount * next_value - value + discount * lam * next_advantage
        next_advantage = torch.where(acts, advantage, next_advantage)
        next_value = torch.where(acts, value, next_value)
        advantages[:, t] = advantage
    return advantages, advantages + values


def transition_gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [N] of N consecutive transitions of one or several episodes, one after the other.

    A terminated transition has no future; a truncated one bootstraps its ``next_values`` entry. Neither lets an
    advantage of the following episode through. The last transition bootstraps unless it terminated.

    Args:
        rewards, values: [N], rewards ``r_t`` and values ``V(s_t)``.
        next_values: [N], ``V`` of the state that transition ``t`` led to (before any reset); not read where terminated.
        terminated, truncated: [N] bool.
        gamma, lam: discount factor and lambda per transition.

    Raises:
        NonFiniteError: a reward or value that is read is NaN or infinite; the message names the transition.

    >>> zeros, never = torch.zeros(4), torch.zeros(4, dtype=torch.bool)
    >>> terminated = torch.tensor([False, True, False, False])
    >>> transition_gae(torch.tensor([1.0, 1.0, 5.0, 5.0]), zeros, zeros, terminated, never)[0]
    tensor([1.9405, 1.0000, 9.7025, 5.0000])
    """
    rewards = _finite("reward", rewards.detach())
    values = _finite("value", values.detach())
    next_values = _finite("next value", masked_values(next_values.detach(), ~terminated))
    deltas = rewards + gamma * next_values - values
    carry = gamma * lam * (~(terminated | truncated)).to(deltas.dtype)
    advantages = torch.zeros_like(deltas)
    following = deltas.new_zeros(())
    for t in reversed(range(deltas.shape[0])):
        following = deltas[t] + carry[t] * following
        advantages[t] = following
    return advantages, advantages + values


def _finite(what: str, numbers: Tensor) -> Tensor:
    bad = (~numbers.isfinite()).nonzero()
    if bad.numel():
        position = tuple(bad[0].tolist())
        where = ", ".join(f"{axis} {place}" for axis, place in zip(("row", "token"), position, strict=False))
        raise NonFiniteError(f"the {what} at {where} is {numbers[position].item()}; find the step that produced it")
    return numbers


def turn_discounts(action_mask: Tensor, gamma: float) -> Tensor:
    """Return ``gamma`` [B, T] on the last action token of each turn, 1 on its other tokens, 0 outside the mask.

    A turn is an unbroken run of action tokens, which the policy sampled between two texts of the environment. Given as
    ``gamma`` to the functions of this package, it makes the discount count turns instead of tokens.

    >>> mask = torch.tensor([[True, True, False, True]])
    >>> turn_discounts(mask, 0.5).tolist()
    [[1.0, 0.5, 0.0, 0.5]]
    """
    followed = torch.cat([action_mask[:, 1:], torch.zeros_like(action_mask[:, :1])], dim=1)
    discounts = torch.ones_like(action_mask, dtype=torch.float32).masked_fill(~followed, gamma)
    return masked_values(discounts, action_mask)
