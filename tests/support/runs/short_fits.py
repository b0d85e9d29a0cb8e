"""Short runs of GRPO in this process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.policy import Policy


def make(
    model_folder: Path, environment: Any, grpo: dict[str, Any] | None = None, **options: Any
) -> tuple[GRPO, RolloutDataModule]:
    """Return GRPO with a tiny policy and its data; options are those of the data module."""
    settings: dict[str, Any] = {"groups": 4, "group_size": 4, "iterations": 3, "sampling": Sampling(max_tokens=6)}
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, **(grpo or {}))
    return algorithm, RolloutDataModule(environment, **{**settings, **options})


def fingerprint(algorithm: Algorithm) -> str:
    """Return a hash of all weights of the policies."""
    weights = [weight.detach().numpy().tobytes() for weight in algorithm.policies.parameters()]
    return hashlib.sha256(b"".join(weights)).hexdigest()
