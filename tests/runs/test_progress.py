"""The progress of a run: lines count iterations, and a terminal of any width shows whole names and numbers."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import CoordinationGame
from rich.console import Console

from mrlm_pl import GRPO, SFT, Policy, RolloutDataModule, TrajectoryDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs import Trainer
from mrlm_pl.runs.console import RunProgress, _bar, _metric_texts, outliving_readers
from mrlm_pl.runs.records.run import recorded_iterations
from tests.support.runs.short_fits import make


class Terminal(io.StringIO):
    """Collects the output for a terminal, with a new line for each movement of the cursor."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        text = re.sub(r"\x1b\[[\d;?]*[A-Zlh]", "\n", self.getvalue())
        return re.sub(r"\x1b\[[\d;]*m", "", text).replace("\r", "\n")


def test_a_terminal_shows_whole_names_and_numbers(
    outside_the_repository: None, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    heights = []
    monkeypatch.setenv("TERM", "xterm")
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        policies = {name: Policy(str(model_folder), learning_rate=1e-3) for name in ("first_of_two", "second_of_two")}
        algorithm = GRPO(policies, {"row": "first_of_two", "column": "second_of_two"}, kl={"coefficient": 0.1})
        options = {"groups": 2, "group_size": 2, "iterations": 2, "sampling": Sampling(max_tokens=4)}
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", terminal := Terminal())
            trainer = Trainer(accelerator="cpu", limit_val_batches=0)
            trainer.fit(algorithm, RolloutDataModule(CoordinationGame(), **options))
        lines = [line for line in terminal.screen().splitlines() if re.match(r"iterations |\w+ |\w+/\w", line)]
        texts = _metric_texts(trainer.progress_bar_metrics)
        assert len(texts) >= 6
        assert max(map(len, lines)) <= columns
        assert "…" not in "".join(lines)
        assert any(re.search(r"^iterations .*━ 2/2 \d:\d\d:\d\d elapsed, 0:00:00 left *$", line) for line in lines)
        places = [next(n for n, line in enumerate(reversed(lines)) if text in re.split("  +", line)) for text in texts]
        heights.append(max(places) - min(places) + 1)
    assert heights[1] < heights[0], "a wide terminal has several metrics in a line"


def counted(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("iterations ")]


@pytest.mark.parametrize(
    ("bounds", "before", "after"),
    [
        ({"max_epochs": 1}, ["1/2", "2/2"], ["3/4", "4/4"]),
        ({"max_epochs": -1, "max_steps": 6}, ["1/3", "2/3", "3/3"], []),  # two updates an iteration
        ({"max_epochs": 9, "max_steps": 5}, ["1/3", "2/3"], []),  # it ends within the third
    ],
)
@pytest.mark.long_after(1)
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


def test_a_run_resumed_within_an_iteration_shows_its_reward_at_its_place(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"groups": 4, "group_size": 2, "minibatches": 2, "iterations": 3}

    def names(steps: int, checkpoint: Path | None) -> list[list[str]]:
        progress = RunProgress(live=False)
        trainer = quiet_trainer(callbacks=[progress], enable_progress_bar=True, max_steps=steps)
        trainer.fit(*make(model_folder, echo(), **options), ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iterations")]
        return [[part.split()[0] for part in line.split("  ")[1:-1]] for line in lines]

    before = names(3, None)  # the second iteration has begun
    after = names(6, tmp_path / "last.ckpt")
    assert "reward" in before[0], "the name of the metrics file without rollout/"
    assert before + after == [before[0]] * 3


@pytest.mark.parametrize(
    ("steps", "recorded", "told"),
    [(2, "1.0", "1 of 3"), (3, "2.0", "1 of 3"), (3, "3.0", "1 of 3; 1 iteration is played again")],
)
@pytest.mark.long_after(1)
def test_a_resumed_run_tells_where_it_continues(
    steps: int, recorded: str, told: str, model_folder: Path, echo: Any, tmp_path: Path, capsys: Any
) -> None:
    options = {"groups": 4, "group_size": 2, "minibatches": 2, "iterations": 3}  # two updates an iteration
    for limit, resume in ((steps, False), (6, True)):
        capsys.readouterr()
        trainer = Trainer(output=str(tmp_path / "run"), resume=resume, accelerator="cpu", max_steps=limit)
        trainer.fit(*make(model_folder, echo(), **options))
        if not resume:
            metrics = tmp_path / "run" / "metrics.csv"
            assert recorded_iterations(metrics.parent) == math.ceil(steps / 2)
            with metrics.open("a") as file:  # of an update that a kill has lost
                csv.DictWriter(file, metrics.read_text().splitlines()[0].split(",")).writerow(
                    {"step": steps, "progress/iteration": recorded}
                )
    assert f"mrlm: continuing at iteration {told}\n" in capsys.readouterr().err


def test_the_time_left_is_known_for_long_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, now = _bar(Console(file=io.StringIO())), [0.0]
    monkeypatch.setattr(bar, "get_time", lambda: now[0])
    task = bar.add_task("iterations", total=10, completed=4)  # a resumed run
    for done in (5, 6, 7):
        now[0] += 100.0
        bar.update(task, completed=done)
    assert bar.tasks[0].time_remaining == 300.0


def test_the_end_names_failed_episodes(
    model_folder: Path, echo: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, environment, of in (("whole", echo(), None), ("part", echo(size=2, fail_every=2), "4 of 8")):
        trainer = Trainer(output=str(tmp_path / name), accelerator="cpu", limit_val_batches=0)
        trainer.fit(*make(model_folder, environment, groups=2, group_size=2, iterations=2))
        said = re.search(r"(\d+ of \d+) episodes failed", capsys.readouterr().out)
        assert (None if said is None else said[1]) == of


def test_lines_of_every_so_many_iterations(
    model_folder: Path, echo: Any, quiet_trainer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet_trainer(callbacks=[RunProgress(live=False, every=3)], enable_progress_bar=True)
    trainer.fit(*make(model_folder, echo(), groups=1, group_size=2, iterations=7))
    assert counted(capsys.readouterr().out) == ["3/7", "6/7", "7/7"]
    with pytest.raises(ConfigurationError, match="RunProgress: every is 0"):
        RunProgress(every=0)


def test_each_validation_has_a_line_also_behind_the_last_batch(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"{name}: 1+1=", "completion": "2"}) + "\n")
    trainer = quiet_trainer(
        callbacks=[RunProgress(live=False)], enable_progress_bar=True, max_epochs=2, limit_val_batches=1
    )
    data = TrajectoryDataModule(str(tmp_path / "train.jsonl"), validation=str(tmp_path / "held_out.jsonl"))
    trainer.fit(SFT({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    kinds = [line[0] for line in lines if line and line[0] in ("batches", "validation")]
    assert kinds == ["batches", "validation"] * 2
    _, last = (line[1:] for line in lines if line and line[0] == "validation")
    assert last == ["val/nll", f"{float(trainer.callback_metrics['val/nll']):.3f}"]


def test_a_run_outlives_the_readers_of_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        with outliving_readers():
            Console().print("a table")
            print("a line", flush=True)
            print("another", flush=True)
        assert sys.stdout is unread
    assert capsys.readouterr().err == "mrlm: the reader of the output has ended; the run continues without output\n"
