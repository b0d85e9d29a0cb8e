"""Engine, learner and strategies on an accelerator. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.algorithms import GRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.trainer.fsdp import FSDP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def fit(model_folder: Path, environment: Any, trainer: Any, cls: Any = GRPO, **options: Any) -> Any:
    algorithm = cls({"main": Policy(str(model_folder), learning_rate=1e-3, **options)})
    data = RolloutDataModule(environment, groups=4, group_size=4, iterations=2, sampling=Sampling(max_tokens=8))
    trainer.fit(algorithm, data)
    return trainer.callback_metrics


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_a_run_on_one_gpu(cls: Any, precision: str, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = fit(model_folder, echo(turns=2), quiet_trainer(accelerator="gpu", devices=1, precision=precision), cls)
    assert float(metrics["train/ratio_deviation"]) < 1e-3
    assert float(metrics["train/grad_norm"]) > 0


def test_adapters_on_a_gpu(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = fit(model_folder, echo(), quiet_trainer(accelerator="gpu", devices=1), lora=LoRA(rank=2))
    assert float(metrics["train/ratio_deviation"]) < 1e-3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strategies_on_a_gpu(strategy: str, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    chosen: Any = FSDP() if strategy == "fsdp" else strategy
    metrics = fit(model_folder, echo(), quiet_trainer(accelerator="gpu", devices=1, strategy=chosen))
    assert float(metrics["train/grad_norm"]) > 0
