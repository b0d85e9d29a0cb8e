"""Runs of a trainer: their files, and their continuation."""

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.algorithms import GRPO
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.policy.tiny import tiny_model_path
from mrlm_pl.runs import trainer as trainer_module

CONFIG = """
model: {class_path: ToyAlgorithm, init_args: {rate: 0.25}}
data: {class_path: ToyData}
trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false, enable_model_summary: false}
"""
# w <- w - 0.25 * 2 (w - target), targets 1, 3: 0 -> 0.5 -> 1.75 -> 1.375 -> 2.1875
WEIGHTS = [0.0, 0.5, 1.75, 1.375]
FINAL = 2.1875


@pytest.fixture(autouse=True)
def config() -> None:
    Path("toy.yaml").write_text(CONFIG)


@pytest.fixture
def fit(mrlm):
    """Runs ``mrlm fit`` and checks its status."""

    def run(*arguments, status=0):
        result = mrlm("fit", "--config", "toy.yaml", *arguments)
        assert result[0] == status, result[2]
        return result[2]

    return run


def files() -> list[str]:
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


def outcome(folder: str, rank: int = 0) -> dict:
    return json.loads(Path(folder, f"rank-{rank}.json").read_text())


def logged(folder: str) -> dict[int, float]:
    with Path(folder, "metrics.csv").open() as file:
        rows = [(int(row["step"]), row["train/weight"]) for row in csv.DictReader(file)]
    steps = [step for step, value in rows if value]
    assert len(steps) == len(set(steps))
    return {step: float(value) for step, value in rows if value}


def test_an_option_that_a_later_one_replaces_is_told(fit):
    told = "warning: --trainer.max_epochs is given 2 times; the last one counts: 1\n"
    assert told in fit("--trainer.max_epochs", "2", "--trainer.max_epochs=1")
    assert outcome("runs/toy")
    assert "is given" not in fit("--trainer.max_epochs", "1", "--config", "toy.yaml")


def test_run_folder_holds_metrics_checkpoint_and_configuration(fit):
    fit("--seed_everything", "5")
    run = Path("runs/toy")
    assert outcome("runs/toy") == {"weight": FINAL, "step": 4, "seed": 5}
    assert logged("runs/toy") == dict(enumerate(WEIGHTS))
    assert list((run / "tensorboard").glob("events.*"))
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["last.ckpt"]
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["seed_everything"] == 5
    assert saved["model"] == {
        "class_path": "mrlm_toy.ToyAlgorithm",
        "init_args": {"policies": None, "rate": 0.25, "fail_at": -1},
    }
    assert not Path("config.yaml").exists()
    assert not Path("lightning_logs").exists()


def test_second_run_does_not_touch_the_first(fit):
    fit()
    before = {path: path.read_bytes() for path in Path("runs/toy").rglob("*") if path.is_file()}
    told = fit("--model.rate", "0.5")
    assert "mrlm: runs/toy holds an earlier run, so this one writes to runs/toy-2\n" in told
    assert {path: path.read_bytes() for path in Path("runs/toy").rglob("*") if path.is_file()} == before
    assert outcome("runs/toy-2")["weight"] == 3.0


def test_saved_configuration_repeats_the_run(fit, mrlm):
    fit("--model.rate", "0.125")
    assert mrlm("fit", "--config", "runs/toy/config.yaml")[0] == 0
    assert outcome("runs/toy-2") == outcome("runs/toy")


def test_last_continues_where_the_run_was(fit, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "handlers", [caplog.handler])
    fit("--trainer.max_epochs", "1")
    assert outcome("runs/toy")["weight"] == 1.75
    message = fit("--ckpt_path", "last", "--trainer.enable_progress_bar", "true")
    own = [line for line in message.splitlines() if "continuing" in line]
    assert own == [
        "mrlm: continuing runs/toy from runs/toy/checkpoints/last.ckpt",
        "mrlm: continuing at batch 2 of 4",
    ]
    assert "max_epochs=2" in caplog.text
    assert "Restor" not in caplog.text
    assert outcome("runs/toy") == {"weight": FINAL, "step": 4, "seed": 0}
    assert logged("runs/toy") == dict(enumerate(WEIGHTS))
    assert Path("runs/toy/config-2.yaml").exists()
    (checkpoint,) = Path("runs/toy/checkpoints").iterdir()
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4
    assert not Path("runs/toy-2").exists()


def test_steps_that_a_crash_lost_are_told_once(fit):
    fit("--model.fail_at", "3", status=1)
    assert list(logged("runs/toy")) == [0, 1, 2]  # the checkpoint is of step 2
    fit("--ckpt_path", "last")
    assert logged("runs/toy") == dict(enumerate(WEIGHTS))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--trainer.val_check_interval", "5"), "mrlm: error: `val_check_interval` (5) must be less"),
        (("--trainer.callbacks+", "EarlyStopping", "--trainer.callbacks.monitor", "los"), "metric `los` which is not"),
    ],
)
def test_settings_that_lightning_finds_wrong_in_a_run_are_one_line(fit, options: tuple[str, ...], told: str) -> None:
    text = fit(*options, status=2)
    assert told in text
    assert "Traceback" not in text


def test_failure_while_running_is_a_message_with_status_1(fit):
    message = fit("--model.fail_at", "1", status=1)
    assert message == "mrlm: error: the loss is nan at step 1; lower the learning rate\n"


def test_checkpoint_does_not_override_the_configured_model(fit):
    fit("--trainer.max_epochs", "1")
    fit("--ckpt_path", "runs/toy/checkpoints/last.ckpt", "--model.rate", "0.0", "--trainer.max_epochs", "2")
    assert yaml.safe_load(Path("runs/toy/config-2.yaml").read_text())["model"]["init_args"]["rate"] == 0.0
    fit("--ckpt_path", "runs/toy/checkpoints/last.ckpt", "--model.rate", "0.5", "--trainer.max_epochs", "2")
    assert not Path("runs/toy/config-3.yaml").exists(), "nothing was trained"


def test_checkpoints_by_step_and_loggers_of_the_user(fit):
    logger = json.dumps({"class_path": "CSVLogger", "init_args": {"save_dir": "own", "name": "", "version": ""}})
    best = json.dumps([{"class_path": "ModelCheckpoint", "init_args": {"monitor": "val/weight", "filename": "best"}}])
    options = ("--trainer.logger", logger, "--trainer.callbacks", best)
    fit("--checkpoint.every_n_train_steps", "3", *options)
    assert sorted(path.name for path in Path("runs/toy/checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    state = torch.load("runs/toy/checkpoints/last.ckpt", weights_only=True)
    assert state["global_step"] == 4, "the end of the run is saved too"
    assert Path("own/metrics.csv").exists()
    files = [Path(name).read_text().splitlines() for name in ("own/metrics.csv", "runs/toy/metrics.csv")]
    own, ours = map(list, map(csv.DictReader, files))
    assert ours == own, "`mrlm view` reads it"
    assert not Path("runs/toy/tensorboard").exists()


def test_save_last_writes_no_second_last_checkpoint(fit):
    mine = json.dumps([{"class_path": "ModelCheckpoint", "init_args": {"save_last": True, "save_top_k": -1}}])
    fit("--trainer.callbacks", mine)
    names = sorted(path.name for path in Path("runs/toy/checkpoints").iterdir())
    assert names == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"]


def test_loggers_and_checkpoints_can_be_turned_off(fit):
    fit("--trainer.logger", "false", "--trainer.enable_checkpointing", "false")
    expected = [".lock", "config.yaml", "rank-0.json", "state.json"]
    assert sorted(path.name for path in Path("runs/toy").iterdir()) == expected


def test_fast_development_run_and_barebones(fit):
    """Neither writes metrics or checkpoints; a development run leaves nothing."""
    fit("--trainer.fast_dev_run", "true")
    assert files() == ["toy.yaml"]
    assert not Path("runs").exists()
    quiet = ("--trainer.enable_progress_bar", "null", "--trainer.enable_model_summary", "null")
    fit("--trainer.barebones", "true", *quiet)
    written = [f"runs/toy/{name}" for name in (".lock", "config.yaml", "rank-0.json", "state.json")]
    assert files() == [*written, "toy.yaml"]
    assert outcome("runs/toy") == {"weight": FINAL, "step": 4, "seed": 0}


def test_validation_of_a_run_writes_beside_it(fit, mrlm):
    fit()
    before = Path("runs/toy/metrics.csv").read_bytes()
    status, out, err = mrlm("validate", "--config", "toy.yaml", "--ckpt_path", "last")
    assert status == 0, err
    assert "2.1875" in out
    assert Path("runs/toy/metrics.csv").read_bytes() == before
    assert Path("runs/toy/validate/metrics.csv").exists()
    assert mrlm("test", "--config", "toy.yaml", "--ckpt_path", "last")[0] == 0
    assert Path("runs/toy/test/config.yaml").exists()


def test_prediction_writes_the_episodes(fit, mrlm):
    fit()
    status, out, err = mrlm("predict", "--config", "toy.yaml", "--ckpt_path", "last")
    assert status == 0, err
    folder = "runs/toy/predict/episodes"
    assert out.endswith(f"mrlm: the episodes are in {folder}; look at them with `mrlm view runs/toy/predict`\n")
    status, out, err = mrlm("view", "runs/toy/predict", "--text")
    assert (status, str(FINAL) in out) == (0, True), err
    _, second = sorted(Path("runs/toy/predict/episodes").iterdir())
    (episode,) = read_episodes(second)
    assert (episode.id, episode.task.index) == (str(FINAL), 3)


def test_train_writes_to_its_folder_and_resumes(mrlm):
    command = ("train", "--config", "toy.yaml", "--output", "out")
    assert mrlm(*command, "--resume", "--trainer.max_epochs", "1")[0] == 0
    assert outcome("out")["step"] == 2
    status, _, err = mrlm(*command)
    assert status == 2
    assert "out holds a run; add `--resume`" in err
    assert mrlm(*command, "--resume")[0] == 0
    assert outcome("out") == {"weight": FINAL, "step": 4, "seed": 0}
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume",), "resume needs the folder of the run; name it with `output` (`--output FOLDER`)"),
        (("--output", "out", "--ckpt_path", "x"), "there is no checkpoint 'x'"),
        (("--output",), "expected one argument"),
    ],
)
def test_train_explains_options_that_do_not_fit(mrlm, options, message):
    status, _, err = mrlm("train", "--config", "toy.yaml", *options)
    assert status == 2
    assert message in err


def test_a_resume_without_configuration_and_folder_asks_for_the_folder(mrlm):
    status, _, err = mrlm("train", "--resume")
    assert (status, err) == (
        2,
        "mrlm: error: resume needs the folder of the run; name it with `output` (`--output FOLDER`)\n",
    )


def test_train_help_has_its_own_options_and_those_of_fit(mrlm):
    status, out, _ = mrlm("train", "--help")
    assert status == 0
    assert "--output FOLDER" in out
    assert mrlm("fit", "--help")[1].startswith("usage: mrlm fit [options]\n")
    assert mrlm("validate", "--help")[1].splitlines()[2].startswith("Train, validate, test or predict")
    for command in ("collect", "gateway", "serve"):
        assert mrlm(command, "--help")[1].splitlines()[0].endswith("[options]"), command
    assert "--checkpoint.every_n_train_steps" in out
    assert "lightning.pytorch" not in out, "`--trainer.callbacks.help NAME` and others show its classes"
    assert "mrlm_pl.GRPO" in out


def test_a_class_that_its_module_no_longer_has_is_not_in_the_help(mrlm):
    kept = {name: type(name, (GRPO,), {"__module__": "__main__"}) for name in ("Kept", "Gone")}
    with mock.patch.object(sys.modules["__main__"], "Kept", kept["Kept"], create=True):
        status, out, _ = mrlm("fit", "--help")
    assert status == 0
    assert "__main__.Kept" in out
    assert "__main__.Gone" not in out


@pytest.mark.slow
def test_two_processes_share_a_numbered_folder(fit):
    fit()
    root = Path(__file__).parents[3]
    paths = [str(Path(__file__).parents[1] / "plugin"), str(root), str(root / "environments"), str(root / "callbacks")]
    script = Path("launch.py")  # the launcher starts the same command line again
    script.write_text("import sys\nfrom mrlm_pl.cli.main import main\nsys.exit(main())\n")
    options = ("--trainer.strategy", "ddp", "--trainer.devices", "2", "--trainer.max_epochs", "1")
    done = subprocess.run(
        [sys.executable, str(script), "fit", "--config", "toy.yaml", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in Path("runs").iterdir()) == ["toy", "toy-2"]
    assert outcome("runs/toy-2", 0) == outcome("runs/toy-2", 1)


def test_a_run_is_one_epoch_unless_its_length_is_given(fit):
    Path("toy.yaml").write_text(CONFIG.replace("max_epochs: 2, ", ""))
    fit()
    assert outcome("runs/toy")["step"] == 2
    fit("--trainer.max_steps", "3")
    assert outcome("runs/toy-2")["step"] == 3


@pytest.mark.parametrize(("supported", "told"), [(False, True), (True, False)])
@pytest.mark.long_after(1)
def test_emulated_bf16_is_told(fit, monkeypatch, supported, told):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert ("emulates" in fit("--trainer.precision", "bf16-mixed")) == told
    assert "emulates" not in fit()


@pytest.mark.long
def test_a_measured_precision_is_recorded_and_kept_by_a_resumed_run(mrlm, monkeypatch):
    quickstart = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    options = ["--config", str(quickstart), "--output", "runs/auto", "--resume", "--trainer.precision", "auto"]
    options += ["--data.groups", "1", "--data.group_size", "2", "--trainer.callbacks", "[]"]
    for steps, mixed in ((1, 0.1), (2, 10.0)):
        monkeypatch.setattr(
            trainer_module, "product_seconds", lambda *_, mixed=mixed: {"32-true": 1.0, "bf16-mixed": mixed}
        )
        status, _, printed = mrlm("fit", *options, "--trainer.max_steps", str(steps))
        assert status == 0, printed
        assert ("precision bf16-mixed: matrix products of" in printed) == (steps == 1)
        assert "trainer.precision '" not in printed, "it has not changed"
    for name in ("config.yaml", "config-2.yaml"):
        assert yaml.safe_load(Path("runs/auto", name).read_text())["trainer"]["precision"] == "bf16-mixed"


def test_a_truncated_checkpoint_is_never_taken_for_a_whole_one(fit):
    fit("--trainer.max_epochs", "1")
    checkpoint = Path("runs/toy/checkpoints/last.ckpt")
    whole = checkpoint.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        checkpoint.write_bytes(whole[:size])
        message = fit("--ckpt_path", "last", status=2)
        assert "'runs/toy/checkpoints/last.ckpt' is not a complete checkpoint" in message
        assert outcome("runs/toy")["weight"] == 1.75, "nothing was lost"
    checkpoint.write_bytes(whole)
    fit("--ckpt_path", "last")
    assert outcome("runs/toy")["weight"] == FINAL


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(fit, monkeypatch):
    saved, write = [], torch.save

    def die(checkpoint, file):
        write(checkpoint, file)
        saved.append(checkpoint["global_step"])
        if len(saved) == 3:
            file.truncate(file.tell() // 2)
            raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", die)
    with pytest.raises(BaseException):  # noqa: B017, PT011  Lightning ends the process in its own way
        fit("--checkpoint.every_n_train_steps", "1")
    monkeypatch.setattr(torch, "save", write)
    Path("runs/toy/checkpoints/last.ckpt.part").write_bytes(b"half of one, which SIGKILL leaves behind")
    assert torch.load("runs/toy/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    fit("--ckpt_path", "last", "--checkpoint.every_n_train_steps", "1")
    assert outcome("runs/toy")["weight"] == FINAL
    assert [path.name for path in Path("runs/toy/checkpoints").iterdir()] == ["last.ckpt"]


def test_validate_plays_also_where_training_skips_validation(mrlm):
    status, out, err = mrlm("validate", "--config", "toy.yaml", "--trainer.limit_val_batches", "0")
    assert status == 0, err
    assert "val/weight" in out
    assert "ignoring `trainer.limit_val_batches: 0`, which leaves `mrlm validate` nothing to do" in err


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_options_of_checkpoints_belong_to_training(mrlm, stage: str) -> None:
    status, _, message = mrlm(stage, "--config", "toy.yaml", "--checkpoint.minutes=3")
    assert status == 2
    assert f"checkpoint.minutes: `mrlm {stage}` saves none; leave the option out" in message


@pytest.mark.parametrize(("stage", "split"), [("validate", "validation"), ("test", "test")])
def test_a_stage_without_data_says_what_is_missing_and_leaves_no_folder(mrlm, stage: str, split: str) -> None:
    Path("rows.jsonl").write_text('{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n')
    status, _, err = mrlm(stage, "--model", "SFT", "--data", "TrajectoryDataModule", "--data.train", "rows.jsonl")
    assert status == 2
    assert f"mrlm: error: data.{split} names no file; give one, as in `--data.{split} held_out.jsonl`" in err
    assert not list(Path("runs").rglob("*.yaml"))


def test_a_stage_that_the_data_does_not_have_names_another(mrlm) -> None:
    data = ("--data", "TrajectoryDataModule", "--data.train", "rows.jsonl")
    status, _, err = mrlm("predict", "--model", "SFT", "--model.policies.main", "no/model", *data)
    assert (status, "data: TrajectoryDataModule plays no episodes" in err, "`mrlm test`" in err) == (2, True, True), err
    assert not Path("runs").exists()


@pytest.mark.parametrize("options", [(), ("--output", "runs/mine")])
@pytest.mark.long_after(1)
def test_a_command_works_again_after_a_mistake_that_its_setup_has_found(mrlm, options: tuple[str, ...]) -> None:
    Path("rows.jsonl").write_text('{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}\n')
    shutil.copytree(tiny_model_path(), "model")
    weights = Path("model/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    command = ("fit", "--model", "SFT", "--model.policies.main", "model", "--data", "TrajectoryDataModule")
    command += ("--data.train", "rows.jsonl", "--trainer.accelerator", "cpu", *options)
    status, _, err = mrlm(*command)
    assert (status, "truncated or damaged" in err) == (2, True), err
    assert not list(Path("runs").glob("*"))
    weights.write_bytes(whole)
    status, out, err = mrlm(*command)
    assert (status, f"the run is in {options[-1] if options else 'runs/sft'}\n" in out) == (0, True), err


@pytest.mark.long
def test_the_report_of_a_checkpoint_names_it(mrlm) -> None:
    words = ("--model", "GRPO", "--data", "RolloutDataModule", "--data.environment", "math", "--data.iterations", "1")
    short = ("--data.groups", "1", "--data.group_size", "2", "--data.validation_episodes", "2")
    run = (*words, *short, "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "0")
    assert mrlm("fit", *run, "--output", "run")[0] == 0
    status, out, err = mrlm("validate", *run, "--ckpt_path", "run/checkpoints/last.ckpt")
    assert status == 0, err
    assert "model          run/checkpoints/last.ckpt\n" in out


def ended_by(number: int, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Send a signal to this process at an update."""
    from mrlm_toy.training import ToyAlgorithm

    step = ToyAlgorithm.training_step

    def send(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.global_step == at:
            monkeypatch.setattr(ToyAlgorithm, "training_step", step)
            signal.raise_signal(number)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(ToyAlgorithm, "training_step", send)


@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
@pytest.mark.long_after(1)
def test_a_run_that_a_signal_ends_says_how_to_continue(
    number: int,
    status: int,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fit: Any,
    mrlm: Any,
) -> None:
    before = [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)]
    ended_by(number, monkeypatch, at=0)
    told = fit(status=status)
    assert f"mrlm: {name} has ended fit; continue with `mrlm train --output runs/toy --resume`" in told
    assert "Received" not in caplog.text, "Ctrl-C is no SIGTERM"
    assert "Traceback" not in told
    assert [signal.getsignal(item) for item in (signal.SIGINT, signal.SIGTERM)] == before
    assert torch.load("runs/toy/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1
    status, _, told = mrlm("train", "--output", "runs/toy", "--resume")
    assert status == 0, told
    assert "changed since" not in told
    assert outcome("runs/toy")["step"] == 4  # the toy's data restart in each run


def test_a_signal_before_the_first_checkpoint_is_told(monkeypatch: pytest.MonkeyPatch, fit: Any) -> None:
    ended_by(signal.SIGINT, monkeypatch, at=0)
    told = fit("--trainer.enable_checkpointing", "false", status=130)
    assert "there is no checkpoint yet" in told


def test_a_signal_ends_an_evaluation_without_a_remedy(
    monkeypatch: pytest.MonkeyPatch, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    def end(*arguments: Any, **options: Any) -> None:
        raise SIGTERMException

    monkeypatch.setattr("lightning.pytorch.Trainer.validate", end)
    status, _, told = mrlm("validate", "--config", "toy.yaml")
    assert (status, told.strip()) == (143, "mrlm: SIGTERM has ended validate")
    monkeypatch.setattr("mrlm_pl.runs.trainer.rank_zero_only", SimpleNamespace(rank=1))
    status, _, told = mrlm("validate", "--config", "toy.yaml")
    assert (status, "SIGTERM" in told) == (0, False), "any other status would have the first process killed"


def test_a_resume_says_what_changed_and_honors_it_or_refuses(fit: Any, mrlm: Any) -> None:
    fit("--trainer.max_epochs", "1")
    told = fit("--ckpt_path", "last", "--model.rate", "0.5")
    assert "changed since runs/toy/config.yaml: model.rate 0.25 -> 0.5, trainer.max_epochs 1 -> 2" in told
    # From 1.75 with the rate 0.5, each batch's number is the weight after it.
    assert outcome("runs/toy")["weight"] == 3.0
    Path("toy.yaml").write_text(CONFIG.replace("ToyData", "RolloutDataModule, init_args: {environment: math}"))
    told = fit("--ckpt_path", "last", status=2)
    assert "data.class_path is 'mrlm_pl.RolloutDataModule'" in told
    assert "has 'mrlm_toy.ToyData'" in told
    assert outcome("runs/toy")["weight"] == 3.0


def test_train_resumes_with_the_configuration_of_the_run(mrlm: Any) -> None:
    assert mrlm("train", "--config", "toy.yaml", "--output", "out", "--trainer.max_epochs", "1")[0] == 0
    Path("toy.yaml").unlink()
    status, _, told = mrlm("train", "--output", "out", "--resume", "--trainer.max_epochs", "2")
    assert status == 0, told
    assert "changed since out/config.yaml: trainer.max_epochs 1 -> 2" in told
    assert outcome("out") == {"weight": FINAL, "step": 4, "seed": 0}
    status, _, told = mrlm("train", "--output", "nothing", "--resume")
    assert status == 2
    assert "'nothing' holds no run with a configuration" in told


def test_a_run_without_a_checkpoint_leaves_nothing_in_the_way_of_the_next(fit: Any, mrlm: Any) -> None:
    fit("--trainer.enable_checkpointing", "false", "--model.fail_at", "3", status=1)
    (Path("runs/toy/episodes")).mkdir()
    (Path("runs/toy/episodes/iteration-000007.jsonl.zst")).write_bytes(b"")
    Path("runs/toy/evaluation_after.json").write_text("{}")
    status, _, told = mrlm("train", "--config", "toy.yaml", "--output", "runs/toy", "--resume")
    assert status == 0, told
    assert "has no checkpoint, so the run starts from the beginning" in told
    assert logged("runs/toy") == dict(enumerate(WEIGHTS))
    assert not Path("runs/toy/episodes").exists()
    assert Path("runs/toy/without-checkpoint-1/episodes/iteration-000007.jsonl.zst").exists()
    assert Path("runs/toy/without-checkpoint-1/config.yaml").exists()
    assert not Path("runs/toy/evaluation_after.json").exists(), "the summary would list it as this run's"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_accelerator_that_is_not_there_has_a_remedy(mrlm: Callable[..., tuple[int, str, str]]) -> None:
    quickstart = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
    status, _, err = mrlm("fit", "--config", str(quickstart), "--trainer.accelerator", "gpu")
    assert status == 2
    assert "set `--trainer.accelerator auto`, or install a PyTorch for it" in err
