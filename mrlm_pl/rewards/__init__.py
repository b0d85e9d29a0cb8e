"""Rewards as pure functions, to be added to what an environment pays."""

from mrlm_pl.rewards.influence import (
    INCENTIVES,
    Horizon,
    RewardShare,
    incentive_signs,
    incentives,
    influence_rewards,
)
from mrlm_pl.rewards.overlong import overlong_penalty

__all__ = [
    "INCENTIVES",
    "Horizon",
    "RewardShare",
    "incentive_signs",
    "incentives",
    "influence_rewards",
    "overlong_penalty",
]
