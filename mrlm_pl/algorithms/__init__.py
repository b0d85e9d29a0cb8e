"""Algorithms: one LightningModule per file."""

from mrlm_pl.algorithms.base import Algorithm
from mrlm_pl.algorithms.grpo import GRPO
from mrlm_pl.algorithms.ppo import PPO
from mrlm_pl.algorithms.sft import SFT

__all__ = ["GRPO", "PPO", "SFT", "Algorithm"]
