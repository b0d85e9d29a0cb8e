"""Role-conditioned advantage estimation: a running baseline for each role of each game."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mrlm_pl.advantages.groups import finite_rewards


def role_baselines(
    rewards: Tensor, roles: Sequence[str], baselines: Mapping[str, float], *, decay: float
) -> tuple[Tensor, dict[str, float]]:
    """The baseline ``b`` [B] fp64 of each row's role before the row, and the baselines after the last row.

    After each row ``b <- decay b + (1 - decay) r`` for its role, so the order of the rows matters.

    Args:
        rewards: [B].
        roles: [B] names of game and role.
        baselines: by role; one that is not there begins at 0.
        decay: weight of the past.

    Raises:
        NonFiniteError: a reward is NaN or infinite.

    Source: arXiv 2506.24119.

    >>> before, after = role_baselines(torch.ones(2), ["poker/first"] * 2, {}, decay=0.75)
    >>> before.tolist(), after
    ([0.0, 0.25], {'poker/first': 0.4375})
    """
    if rewards.shape != (len(roles),):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; give one for each of the {len(roles)} roles")
    after = dict(baselines)
    found = []
    for reward, role in zip(finite_rewards(rewards).tolist(), roles, strict=True):
        before = after.get(role, 0.0)
        found.append(before)
        after[role] = decay * before + (1 - decay) * reward
    return torch.tensor(found, dtype=torch.float64), after
