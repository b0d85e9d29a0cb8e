from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mrlm_callbacks import HeldOutEvaluation

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy


def test_it_reports_before_and_after_on_the_held_out_split(
    model_folder: Path, echo: Any, quiet_trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-2)})
    data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer(callbacks=[HeldOutEvaluation(episodes=8)])
    trainer.fit(algorithm, data)
    folder = Path(trainer.default_root_dir)
    before, after = (json.loads((folder / f"evaluation_{moment}.json").read_text()) for moment in ("before", "after"))
    for report in (before["echo"], after["echo"]):
        assert report["split"] == "test"
        assert report["episodes"] == 8
        assert all(row["task"].startswith("echo/test/") for row in report["transcripts"])
        assert report["ci95"][0] <= report["mean_reward"] <= report["ci95"][1]
    assert before["echo"]["transcripts"] != after["echo"]["transcripts"], "the weights changed in between"
    assert "before training" in capsys.readouterr().out


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"episodes is 0"):
        HeldOutEvaluation(episodes=0)


def test_an_unknown_split_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigurationError, match="split is 'tests'; choose from train, validation, test"):
        HeldOutEvaluation(split="tests")
