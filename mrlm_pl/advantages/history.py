"""Advantages against the history of a run, instead of a comparison within groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards
from mrlm_pl.advantages.whitening import NO_MOMENTS, Moments
from mrlm_pl.losses.masking import check_shape


def history_normalized_advantages(
    rewards: Tensor, keys: Sequence[str], history: Mapping[str, Moments], *, eps: float = 1e-6
) -> Tensor:
    """Return ``(r - m) / (s + eps)`` [B] fp64 with the mean and standard deviation of the key's history.

    The advantage is ``r - m`` alone for a key with fewer than two numbers in its history, or without spread there.

    Args:
        rewards: [B], one for each row.
        keys: [B], key of each row.
        history: moments of the rewards in earlier rollouts, by key. With the present ones in it, the baseline would
            depend on them.
        eps: constant added to the standard deviation, in units of reward.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2603.21563.

    >>> history_normalized_advantages(torch.tensor([3.0, 5.0]), "ab", {"a": Moments(3, 1.0, 8.0)}, eps=0.0).tolist()
    [1.0, 5.0]
    """
    known = [history.get(key, NO_MOMENTS) for key in keys]
    mean = torch.tensor([moments.mean for moments in known], dtype=torch.float64)
    scale = torch.tensor([moments.std + eps if moments.std else 1.0 for moments in known], dtype=torch.float64)
    return (finite_rewards(rewards).double() - mean) / scale


def role_baselines(
    rewards: Tensor, roles: Sequence[str], baselines: Mapping[str, float], *, decay: float
) -> tuple[Tensor, dict[str, float]]:
    """Return the baseline ``b`` [B] fp64 of each row's role before the row, and the baselines after the last row.

    After each row ``b <- decay b + (1 - decay) r`` for its role, so the order of the rows matters.

    Args:
        rewards: [B], one for each row.
        roles: [B], names of game and role.
        baselines: baselines by role; a role without one begins at 0.
        decay: weight of the old baseline.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2506.24119.

    >>> before, after = role_baselines(torch.ones(2), ["poker/first"] * 2, {}, decay=0.75)
    >>> before.tolist(), after
    ([0.0, 0.25], {'poker/first': 0.4375})
    """
    check_shape([len(roles)], rewards=rewards)
    after = dict(baselines)
    baselines_of_rows = []
    for reward, role in zip(finite_rewards(rewards).tolist(), roles, strict=True):
        before = after.get(role, 0.0)
        baselines_of_rows.append(before)
        after[role] = decay * before + (1 - decay) * reward
    return torch.tensor(baselines_of_rows, dtype=torch.float64), after
