"""Precision plugins: fp32 masters under bf16 computation, and refused combinations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.algorithms import GRPO, SFT
from mrlm_pl.data import RolloutDataModule, TrajectoryDataModule
from mrlm_pl.engines import Engine, InProcessEngine, Sampling
from mrlm_pl.engines.base import EngineWrapper
from mrlm_pl.policy import Policy


def test_small_steps_change_the_masters_under_bf16(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "completion": f" {2 * n}, as it should be"} for n in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=5e-6)})
    data = TrajectoryDataModule(str(source), batch_size=20)
    trainer = quiet_trainer(max_epochs=20, precision="bf16-mixed")
    before = Policy(str(model_folder))
    before.load()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 20
    matrices = [
        (old, new)
        for (name, old), new in zip(
            before.model.named_parameters(), algorithm.policy("main").model.parameters(), strict=True
        )
        if old.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    assert all(new.dtype == torch.float32 for _, new in matrices)
    changed = sum(int((old != new).sum()) for old, new in matrices)
    assert changed > 0.95 * sum(old.numel() for old, _ in matrices)
    # A step of this size on weights held in bf16 would be rounded away for most of them.
    stuck = sum(int((old.bfloat16() - 5e-6 == old.bfloat16()).sum()) for old, _ in matrices)
    assert stuck > 0.5 * sum(old.numel() for old, _ in matrices)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_a_rollout_and_its_update_agree_in_every_precision(
    precision: str, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(echo(), groups=2, group_size=3, iterations=2, sampling=Sampling(max_tokens=5))
    trainer = quiet_trainer(precision=precision)
    trainer.fit(algorithm, data)
    # The learner's own numbers stand in for the sampler's where these are rounded differently.
    assert float(trainer.callback_metrics["train/ratio_deviation"]) < 1e-4
    assert float(trainer.callback_metrics["train/mismatch_max_ratio"]) < 1.2


class Untold(EngineWrapper):
    """Does not tell in which precision it computes, as servers do not."""

    def precision(self, policy: str) -> str | None:
        return "unknown"


@pytest.mark.parametrize(
    ("engine", "precision", "differs"),
    [
        (None, "32-true", False),
        (InProcessEngine(), "32-true", False),
        (InProcessEngine(), "64-true", False),
        (InProcessEngine(dtype=torch.float32), "32-true", False),
        (InProcessEngine(dtype=torch.float32), "64-true", True),
        (InProcessEngine(dtype=torch.bfloat16), "32-true", True),
        (EngineWrapper(InProcessEngine(dtype=torch.bfloat16)), "32-true", True),
        (Untold(InProcessEngine()), "32-true", True),
        (InProcessEngine(), "bf16-mixed", True),
    ],
)
def test_the_learner_computes_pi_old_where_the_engines_precision_is_another(
    engine: Engine | None, precision: Any, differs: bool, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(
        echo(), engine=engine, groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=3)
    )
    quiet_trainer(precision=precision, max_steps=1).fit(algorithm, data)
    assert algorithm.recomputes(Sampling()) == differs
    assert algorithm.recomputes(Sampling(top_p=0.9))
