"""Output and log of a run: progress, models, agents, hyper-parameters, and the command that continues it."""

from __future__ import annotations

import csv
import json
import logging
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import mrlm_pl
from mrlm_pl.algorithms import GRPO
from mrlm_pl.policy import Policy
from mrlm_pl.runs.console import RunProgress, silence_noise

TOY = {"model": {"class_path": "ToyAlgorithm"}, "data": {"class_path": "ToyData"}, "trainer": {"accelerator": "cpu"}}
TEAM = {
    "model": {
        "class_path": "GRPO",
        "init_args": {
            "policies": {"first": {"learning_rate": 1e-3}, "second": {"learning_rate": 1e-3}},
            "seats": {"row": "first", "column": "second"},
        },
    },
    "data": {
        "class_path": "RolloutDataModule",
        "init_args": {
            "environment": {"class_path": "CoordinationGame"},
            "groups": 2,
            "group_size": 2,
            "iterations": 2,
            "validation_episodes": 2,
            "sampling": {"max_tokens": 4},
        },
    },
    "trainer": {"accelerator": "cpu", "max_epochs": 1},
}
"""Two agents, each with its own policy."""


def test_a_warning_of_the_project_has_no_line_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warnings.formatwarning", warnings.formatwarning)
    silence_noise()
    own, other = str(Path(mrlm_pl.__file__).with_name("advantages") / "groups.py"), __file__
    assert warnings.formatwarning("a group of one", RuntimeWarning, own, 3) == "mrlm: warning: a group of one\n"
    silence_noise()
    text = warnings.formatwarning("a group of one", RuntimeWarning, filename=other, lineno=3)
    assert "RuntimeWarning: a group of one" in text


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "modeling_utils",
            "We strongly recommend passing in an `attention_mask` since your input_ids may be padded.",
        ),
        (
            "tokenization_utils_base",
            "Token indices sequence length is longer than the specified maximum sequence length for this model "
            "(15023 > 2048). Running this sequence through the model will result in indexing errors",
        ),
    ],
)
def test_a_sampled_pad_token_and_a_long_prompt_are_no_reason_to_warn(module: str, text: str) -> None:
    silence_noise()
    warned, other = (logging.LogRecord("", 30, "", 0, said, None, None) for said in (text, "weights differ"))
    found = logging.getLogger(f"transformers.{module}")
    assert (bool(found.filter(warned)), bool(found.filter(other))) == (False, True)


def test_a_second_fit_does_not_tell_of_the_algorithms_own_callbacks() -> None:
    silence_noise()
    own = GRPO({"main": Policy("builtin:tiny")}).configure_callbacks()
    names = ", ".join(sorted(type(callback).__name__ for callback in own))
    said = f"will override existing callbacks passed to Trainer: {names}"  # as Lightning names them
    found = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    assert not found.filter(logging.LogRecord("", 20, "", 0, said, None, None))


@pytest.mark.long
def test_a_run_of_two_agents_shows_and_logs_each_of_them(mrlm) -> None:
    Path("team.yaml").write_text(yaml.safe_dump(TEAM))
    status, out, err = mrlm("fit", "--config", "team.yaml")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0] == "policies.first: builtin:tiny (llama), 166,848 weights, trained at learning rate 0.001"
    progress = [line for line in lines if line.startswith("iterations ")]
    assert [line.split()[1] for line in progress] == ["1/2", "2/2"], "one line for each iteration"
    assert all(" reward " in line and " agent/row/reward " in line and "…" not in line for line in progress)
    for noise in ("FLOPs", "TPU", "GPU available: False", "Writing model shards", "Trainer already configured"):
        assert noise not in out + err
    assert "mrlm eval --model runs/team" in out, "the next command"
    assert "mrlm view runs/team  #" in out
    with Path("runs/team/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("rollout/reward")]
    assert [float(row["progress/iteration"]) for row in rows] == [1.0, 2.0]
    assert [float(row["progress/episodes"]) for row in rows] == [4.0, 8.0]
    assert float(rows[1]["progress/decisions"]) > float(rows[0]["progress/decisions"]) > 0
    assert float(rows[0]["progress/generated_tokens"]) <= 4 * float(rows[0]["progress/decisions"])
    assert float(rows[1]["progress/seconds"]) > float(rows[0]["progress/seconds"]) > 0
    agents = {name.split("/")[2] for name in rows[0] if name.startswith("rollout/agent/")}
    assert agents == {"row", "column"}
    policies = {name.split("/")[2] for name in rows[0] if name.startswith("rollout/policy/")}
    assert policies == {"first", "second"}
    for row in rows:
        own = [float(row[f"rollout/agent/{agent}/reward"]) for agent in agents]
        assert float(row["rollout/reward"]) == pytest.approx(sum(own) / 2, abs=1e-6)


@pytest.mark.long
def test_the_first_lines_name_the_size_of_the_training_split(mrlm, caplog) -> None:
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(12)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {**TEAM["data"]["init_args"], "environment": {"class_path": "MathEnvironment"}, "iterations": 1}
    data["environment"]["init_args"] = {"data": {"train": "rows.jsonl"}}
    model = {"class_path": "GRPO", "init_args": {"policies": {"main": {"model": "builtin:tiny"}}}}
    trainer = {**TEAM["trainer"], "limit_val_batches": 0}
    Path("sized.yaml").write_text(
        yaml.safe_dump({"model": model, "data": {**TEAM["data"], "init_args": data}, "trainer": trainer})
    )
    status, out, err = mrlm("fit", "--config", "sized.yaml")
    assert status == 0, err
    assert out.splitlines()[1] == "math: 10 tasks in the training split", "the others are held out"
    assert "rows.jsonl: 10 rows in the training split, 2 held out for validation" in caplog.text
    command = next(line.split() for line in out.splitlines() if line.startswith("  mrlm eval "))
    status, _, err = mrlm(*command[1:], "-n", "2", "--max-tokens", "2")
    assert status == 0, err
    status, _, err = mrlm(*command[1:-2], "-n", "2")
    assert (status, "has no split 'test'; it has train: play another, as with `--split train`" in err) == (2, True), err


def test_a_line_has_the_components_of_the_reward(mrlm) -> None:
    data = {**TEAM["data"]["init_args"], "environment": {"class_path": "WritingEnvironment"}}
    model = {"class_path": "GRPO", "init_args": {"policies": {"main": {"model": "builtin:tiny"}}}}
    config = {"model": model, "data": {**TEAM["data"], "init_args": data}, "trainer": TEAM["trainer"]}
    Path("parts.yaml").write_text(yaml.safe_dump(config))
    status, out, err = mrlm("fit", "--config", "parts.yaml")
    assert status == 0, err
    lines = [line.split() for line in out.splitlines() if line.startswith("iterations ")]
    assert len(lines) == 2
    columns = Path("runs/parts/metrics.csv").read_text().splitlines()[0].split(",")
    components = {name.removeprefix("rollout/") for name in columns if name.startswith("rollout/writing/")}
    for words in lines:
        shown = dict(pairwise(words))
        parts = [float(value) for name, value in shown.items() if name in components]
        assert len(parts) > 1
        assert sum(parts) == pytest.approx(float(shown["reward"]), abs=5e-4 * (len(parts) + 1))


def test_the_loggers_have_the_hyper_parameters(mrlm) -> None:
    Path("toy.yaml").write_text(yaml.safe_dump(TOY))
    status, out, err = mrlm("fit", "--config", "toy.yaml", "--model.rate", "0.125")
    assert status == 0, err
    logged = yaml.unsafe_load(Path("runs/toy/tensorboard/hparams.yaml").read_text())
    assert logged["model"]["init_args"]["rate"] == 0.125
    assert "config" not in logged
    assert "mrlm: the run is in runs/toy" in out


def test_a_complete_run_that_is_resumed_says_that_nothing_was_trained(mrlm) -> None:
    Path("toy.yaml").write_text(yaml.safe_dump(TOY))
    status, out, err = mrlm("fit", "--config", "toy.yaml")
    assert (status, "nothing was trained" in out) == (0, False), err
    status, out, err = mrlm("train", "--output", "runs/toy", "--resume")
    assert (status, "nothing was trained" in out) == (0, True), err
    status, out, err = mrlm("train", "--output", "runs/toy", "--resume", "--trainer.max_epochs", "2")
    assert (status, "nothing was trained" in out) == (0, False), err


@pytest.mark.parametrize(("config", "stopped"), [(TEAM, "1 of 2 iterations"), (TOY, "1 of 2 batches")])
@pytest.mark.long_after(1)
def test_a_run_that_a_callback_stops_says_where(mrlm, caplog, config: dict[str, object], stopped: str) -> None:
    Path("config.yaml").write_text(yaml.safe_dump(config))
    name = f"early_{stopped[-7:]}"  # a separate module
    Path(f"{name}.py").write_text(
        "from lightning.pytorch import Callback\n\n\nclass Once(Callback):\n"
        "    def on_train_batch_end(self, trainer, *_):\n        trainer.should_stop = True\n"
    )
    status, out, err = mrlm("fit", "--config", "config.yaml", "--trainer.callbacks", f"./{name}.py:Once")
    assert status == 0, err
    assert f"\nmrlm: stopped by a callback after {stopped}\n" in out
    _, out, _ = mrlm("fit", "--config", "config.yaml")
    assert "stopped" not in out, "a complete run"
    assert "max_epochs" not in caplog.text


def test_bars_and_summaries_can_be_switched_off(mrlm) -> None:
    Path("toy.yaml").write_text(yaml.safe_dump(TOY))
    off = ("--trainer.enable_progress_bar", "false", "--trainer.enable_model_summary", "false")
    status, out, err = mrlm("fit", "--config", "toy.yaml", *off)
    assert status == 0, err
    assert "batch " not in out


@pytest.mark.long
def test_a_run_without_collections_prints_about_fifty_lines(mrlm) -> None:
    Path("toy.yaml").write_text(yaml.safe_dump(TOY))
    status, out, err = mrlm("fit", "--config", "toy.yaml", "--trainer.max_epochs", "60")
    assert status == 0, err
    lines = [line for line in out.splitlines() if line.startswith("batches ")]
    assert 30 <= len(lines) <= 50
    assert lines[-1].startswith("batches 120/120")
    fewer = ("--trainer.callbacks+", "RunProgress", "--trainer.callbacks.every", "50")
    _, out, _ = mrlm("fit", "--config", "toy.yaml", "--trainer.max_epochs", "60", *fewer)
    lines = [line.split()[1] for line in out.splitlines() if line.startswith("batches ")]
    assert lines == ["50/120", "100/120", "120/120"]


def test_a_terminal_shows_the_last_state(quiet_trainer, capsys) -> None:
    from mrlm_toy import ToyAlgorithm, ToyData

    Path("run").mkdir()
    trainer = quiet_trainer(callbacks=[RunProgress(live=True)], enable_progress_bar=True, max_epochs=2)
    trainer.fit(ToyAlgorithm(), ToyData())
    assert "4/4" in capsys.readouterr().out


def test_only_metrics_are_shown_whatever_the_logger(quiet_trainer, capsys, tmp_path: Path) -> None:
    """Lightning's own bars begin with the version of the logger."""
    from lightning.pytorch.loggers import CSVLogger
    from mrlm_toy import ToyAlgorithm, ToyData

    Path("run").mkdir()
    logger = CSVLogger(tmp_path, version=3)
    trainer = quiet_trainer(callbacks=[RunProgress(live=False)], enable_progress_bar=True, logger=logger)
    trainer.fit(ToyAlgorithm(), ToyData())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batches ")]
    assert lines
    assert "v_num" not in "".join(lines)
