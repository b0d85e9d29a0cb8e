"""The lines of progress count iterations, however many batches and updates one has and wherever the run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.runs.console import RunProgress
from tests.data.rollout.test_module import make


def counted(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("iteration ")]


@pytest.mark.parametrize(
    ("bounds", "before", "after"),
    [
        ({"max_epochs": 1}, ["1/2", "2/2"], ["3/4", "4/4"]),
        ({"max_epochs": -1, "max_steps": 6}, ["1/3", "2/3", "3/3"], []),  # two updates an iteration
        ({"max_epochs": 9, "max_steps": 5}, ["1/3", "2/3"], []),  # it ends within the third
    ],
)
def test_iterations_of_several_updates_and_micro_batches(
    bounds: dict[str, int],
    before: list[str],
    after: list[str],
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = {"enable_progress_bar": True, "accumulate_grad_batches": 2}
    options = {"groups": 4, "group_size": 2, "minibatches": 2, "iterations": 2}
    trainer = quiet_trainer(callbacks=[RunProgress(live=False)], **shown, **bounds)
    algorithm, data = make(model_folder, echo(), **options)
    trainer.fit(algorithm, data)
    assert counted(capsys.readouterr().out) == before
    if after:
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        algorithm, data = make(model_folder, echo(), **options)
        trainer = quiet_trainer(callbacks=[RunProgress(live=False)], **shown, max_epochs=2)
        trainer.fit(algorithm, data, ckpt_path=tmp_path / "last.ckpt")
        assert counted(capsys.readouterr().out) == after
