from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from mrlm_callbacks import HeldOutEvaluation
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mrlm_pl.algorithms import GRPO, SFT
from mrlm_pl.data import RolloutDataModule, TrajectoryDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped
from mrlm_pl.policy import Policy
from mrlm_pl.runs.metrics_file import MetricsFile
from tests.support.runs.short_fits import fingerprint


def test_it_reports_before_and_after_on_the_held_out_split(
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"n": max(n, 9)} for n in range(16)]
    monkeypatch.setattr(echo, "tasks", lambda _, split: DatasetTasks("echo", split, rows))
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-2)})
    data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer(callbacks=[HeldOutEvaluation(episodes=16)])
    trainer.fit(algorithm, data)
    folder = Path(trainer.default_root_dir)
    before, after = (json.loads((folder / f"evaluation_{moment}.json").read_text()) for moment in ("before", "after"))
    for report in (before["echo"], after["echo"]):
        assert report["split"] == "test"
        assert report["episodes"] == 16
        assert all(row["task"].startswith("echo/test/") for row in report["transcripts"])
        assert report["ci95"][0] <= report["mean_reward"] <= report["ci95"][1]
    assert before["echo"]["transcripts"] != after["echo"]["transcripts"], "the weights changed in between"
    told = capsys.readouterr().out
    assert "before training" in told
    assert told.count("16; 7 different problems") == 2


@pytest.mark.parametrize("width", [60, 200])
def test_its_table_stands_above_the_live_display(
    width: int, model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-2)})
    data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=1, sampling=Sampling(max_tokens=4))
    shown = io.StringIO()
    with Live("the bar", console=Console(file=shown, force_terminal=True, width=width), auto_refresh=False):
        quiet_trainer(callbacks=[HeldOutEvaluation(episodes=4)]).fit(algorithm, data)
    lines = Text.from_ansi(shown.getvalue()).plain.splitlines()
    assert sum("echo" in line for line in lines) == 2
    assert max(map(cell_len, lines)) <= width


@pytest.fixture
def demonstrations(tmp_path: Path) -> str:
    """Return a file of ten rows; five updates of two rows are an epoch."""
    path = tmp_path / "rows.jsonl"
    roles = ("user", "assistant")
    chats = [[{"role": role, "content": f"Say {number}"} for role in roles] for number in range(10)]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    return str(path)


def fit(trainer: Any, model_folder: Path, source: str) -> SFT:
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=3e-2)})
    trainer.fit(algorithm, TrajectoryDataModule(source, batch_size=2, seed=3))
    return algorithm


def points(folder: Path) -> list[Any]:
    return json.loads((folder / "evaluation_curve.json").read_text())["points"]


def test_a_policy_that_learns_from_files_plays_every_few_steps_and_trains_the_same(
    model_folder: Path, echo: Any, quiet_trainer: Any, demonstrations: str, tmp_path: Path
) -> None:
    def evaluation() -> HeldOutEvaluation:
        sampling = Sampling(max_tokens=6)
        return HeldOutEvaluation(12, "validation", sampling=sampling, every=2, environment=echo())

    folder = tmp_path / "curve"
    trained = fit(quiet_trainer(callbacks=[evaluation()], default_root_dir=folder), model_folder, demonstrations)
    assert fingerprint(trained) == fingerprint(fit(quiet_trainer(), model_folder, demonstrations))
    assert [point["step"] for point in points(folder)] == [0, 2, 4, 5]
    rewards = [point["environments"]["echo"]["mean_reward"] for point in points(folder)]
    assert len(set(rewards)) > 1
    reports = {moment: json.loads((folder / f"evaluation_{moment}.json").read_text()) for moment in ("before", "after")}
    assert [reports[moment]["echo"]["mean_reward"] for moment in reports] == [rewards[0], rewards[-1]]
    assert [reports[moment]["echo"]["model"] for moment in reports] == ["before", "after"]
    # The policy of a run that ends there has the value of the point.
    short = quiet_trainer(callbacks=[evaluation()], max_steps=2, default_root_dir=folder)
    fit(short, model_folder, demonstrations)
    after = json.loads((folder / "evaluation_after.json").read_text())["echo"]
    assert after["mean_reward"] == rewards[1]
    assert [point["step"] for point in points(folder)] == [0, 2], "a new run in the folder begins a new curve"


@pytest.mark.parametrize(("every", "at"), [(2, [-1, 1, 3, 4]), (1, [-1, 0, 1, 2, 3, 4])])
def test_loggers_get_the_means_and_the_metrics_file_keeps_a_row_for_each_update(
    every: int, at: list[int], model_folder: Path, echo: Any, quiet_trainer: Any, demonstrations: str, tmp_path: Path
) -> None:
    callback = HeldOutEvaluation(episodes=8, sampling=Sampling(max_tokens=4), every=every, environment=echo())
    loggers = [CSVLogger(tmp_path, name="", version="csv"), MetricsFile(tmp_path)]
    trainer = quiet_trainer(callbacks=[callback], logger=loggers, default_root_dir=tmp_path, log_every_n_steps=1)
    fit(trainer, model_folder, demonstrations)
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    rows, end_rows = ([row for row in table if row[f"{kind}/echo/reward"]] for kind in ("curve", "held_out"))
    assert [int(row["step"]) for row in rows] == at, "before, after `every` updates, and after the last"
    assert [int(row["step"]) for row in end_rows] == [-1, 4]
    found = [point["environments"]["echo"] for point in points(tmp_path)]
    reports = [json.loads((tmp_path / f"evaluation_{moment}.json").read_text()) for moment in ("before", "after")]
    ends = [report["echo"] for report in reports]
    for column, measured in (("curve", (rows, found)), ("held_out", (end_rows, ends))):
        for name, key in (("reward", "mean_reward"), ("accuracy", "accuracy")):
            logged = [float(row[f"{column}/echo/{name}"]) for row in measured[0]]
            assert logged == pytest.approx([one[key] for one in measured[1]])
    assert "held_out" not in (tmp_path / "metrics.csv").read_text()


def test_the_curve_is_of_the_validation_split_and_the_reports_at_both_ends_of_the_test_split(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = list[tuple[int, str]]()

    def evaluate(data: Any, environment: str, *, split: str, **options: Any) -> Any:
        played.append((data.trainer.global_step, split))
        return evaluate_as_before(data, environment, split=split, **options)

    evaluate_as_before = RolloutDataModule.evaluate
    monkeypatch.setattr(RolloutDataModule, "evaluate", evaluate)
    ends = {0: ["test", "validation"], 4: ["validation", "test"]}
    for split, want in (("test", ends), ("validation", {0: ["validation"], 4: ["validation"]})):
        played.clear()
        algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-2)})
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=4, sampling=Sampling(max_tokens=4))
        quiet_trainer(callbacks=[HeldOutEvaluation(4, split, every=2)]).fit(algorithm, data)
        assert grouped(played) == {0: want[0], 2: ["validation"], 4: want[4]}


def test_a_resumed_run_continues_the_curve(
    model_folder: Path, echo: Any, quiet_trainer: Any, demonstrations: str, tmp_path: Path
) -> None:
    def options(steps: int, folder: str) -> dict[str, Any]:
        callback = HeldOutEvaluation(episodes=4, sampling=Sampling(max_tokens=4), every=1, environment=echo())
        return {"callbacks": [callback], "max_steps": steps, "default_root_dir": tmp_path / folder}

    fit(quiet_trainer(**options(5, "whole")), model_folder, demonstrations)
    first = quiet_trainer(**options(3, "resumed"))
    fit(first, model_folder, demonstrations)
    first.save_checkpoint(tmp_path / "last.ckpt")
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=3e-2)})
    data = TrajectoryDataModule(demonstrations, batch_size=2, seed=3)
    quiet_trainer(**options(5, "resumed")).fit(algorithm, data, ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert points(tmp_path / "resumed") == points(tmp_path / "whole")


def test_a_signal_in_an_evaluation_leaves_no_gap(
    model_folder: Path, echo: Any, run: Any, demonstrations: str, tmp_path: Path
) -> None:
    """The evaluation before the first step is the first, that after two steps the second."""
    for folder, ends in (("whole", [None]), ("ended", [2, None])):
        for ended_in in ends:
            callback = HeldOutEvaluation(episodes=4, sampling=Sampling(max_tokens=4), every=2, environment=echo())
            algorithm = SFT({"main": Policy(str(model_folder), learning_rate=3e-2)})
            data = TrajectoryDataModule(demonstrations, batch_size=2, seed=3)
            run(tmp_path / folder, algorithm, data, callback, ended_in)
    assert [point["step"] for point in points(tmp_path / "whole")] == [0, 2, 4, 5]
    assert points(tmp_path / "ended") == points(tmp_path / "whole")
    steps = [row.partition(",")[0] for row in (tmp_path / "ended" / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", "0", "1", "2", "3", "4"]


def test_files_need_an_environment_and_rollouts_have_theirs(
    model_folder: Path, echo: Any, quiet_trainer: Any, demonstrations: str
) -> None:
    with pytest.raises(ConfigurationError, match=r"TrajectoryDataModule has no environment: name one"):
        fit(quiet_trainer(callbacks=[HeldOutEvaluation()]), model_folder, demonstrations)
    algorithm = GRPO({"main": Policy(str(model_folder))})
    trainer = quiet_trainer(callbacks=[HeldOutEvaluation(environment=echo())])
    with pytest.raises(ConfigurationError, match="a RolloutDataModule has environments"):
        trainer.fit(algorithm, RolloutDataModule(echo(), groups=1, group_size=2, iterations=1))


def test_a_number_below_one_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"episodes is 0"):
        HeldOutEvaluation(episodes=0)


def test_an_unknown_split_is_refused_before_anything_is_played() -> None:
    with pytest.raises(ConfigurationError, match=r"split is 'tests'; did you mean 'test'\? Choose from train, "):
        HeldOutEvaluation(split="tests")
