"""Rewards as pure functions, to be added to what an environment pays."""

from mrlm_pl.rewards.overlong import overlong_penalty

__all__ = ["overlong_penalty"]
