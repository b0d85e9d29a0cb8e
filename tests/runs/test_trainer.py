"""A script has a run folder, durable checkpoints, metrics and a clean shutdown, like the command."""

from __future__ import annotations

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger
from mrlm_environments import MathEnvironment
from transformers import AutoModelForCausalLM

import mrlm_pl
from mrlm_pl.errors import ConfigurationError, RolloutError, StorageError
from mrlm_pl.runs import console

README = Path(__file__).parents[2] / "README.md"
SCRIPT = next(
    block for block in re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S) if "resume=True" in block
)
SHORT = {
    "groups=32, iterations=120": "groups=2, group_size=4, iterations=4",
    "resume=True": (
        "resume=True, accelerator='cpu', callbacks=[*callbacks, mrlm_pl.LastCheckpoint(every_n_train_steps=1)]"
    ),
    "num_episodes=500": "num_episodes=4",
}
"""The README's script for a few seconds, with checkpoints amid the run."""


def short_script(callbacks: str = "[]") -> str:
    script = SCRIPT
    for text, replaced in SHORT.items():
        assert text in script
        script = script.replace(text, replaced)
    return f"callbacks = {callbacks}\n{script}"


def weights(folder: Path) -> bytes:
    return (folder / "runs/first/policies/main/model.safetensors").read_bytes()


def losses(folder: Path) -> list[str]:
    with (folder / "runs/first/metrics.csv").open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]]


def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch, callbacks: Any = ()) -> None:
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    exec(compile(short_script().partition("\n")[2], "README", "exec"), {"callbacks": callbacks, "__name__": "script"})


class Killed(BaseException):
    """Ends a run like a kill: nothing catches it."""


class KillAfter(Callback):
    def __init__(self, updates: int) -> None:
        self.updates = updates

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.updates:
            raise Killed


def test_the_minimal_script_is_short_and_continues_bit_for_bit_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 12
    in_folder(tmp_path / "whole", monkeypatch)
    assert "mrlm: the run is in runs/first" in capsys.readouterr().out
    run = tmp_path / "whole/runs/first"
    expected = {".lock", "checkpoints", "episodes", "metrics.csv", "policies", "state.json", "tensorboard"}
    assert {path.name for path in run.iterdir()} == expected
    assert AutoModelForCausalLM.from_pretrained(run / "policies/main").config.model_type == "llama"

    with pytest.raises(Killed):
        in_folder(tmp_path / "killed", monkeypatch, [KillAfter(2)])
    assert torch.load(tmp_path / "killed/runs/first/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    in_folder(tmp_path / "killed", monkeypatch)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 4


@pytest.mark.slow
def test_the_minimal_script_continues_bit_for_bit_after_sigkill(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mrlm_pl\n" + short_script().replace("iterations=4", "iterations=12"))

    def start(name: str) -> subprocess.Popen[bytes]:
        (tmp_path / name).mkdir(exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, str(script)], cwd=tmp_path / name, env=environment)

    assert start("whole").wait(300) == 0
    process = start("killed")
    table, until = tmp_path / "killed/runs/first/metrics.csv", time.monotonic() + 200
    while not (table.exists() and len(losses(tmp_path / "killed")) > 2):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "killed/runs/first/policies").exists()
    assert start("killed").wait(300) == 0
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def parts() -> tuple[Any, Any]:
    algorithm = mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)})
    sampling = mrlm_pl.Sampling(max_tokens=8)
    environment = MathEnvironment(difficulty=[1, 1])
    data = mrlm_pl.RolloutDataModule(
        environment, groups=2, group_size=2, iterations=1, sampling=sampling, validation_episodes=2
    )
    return algorithm, data


def quiet(**options: Any) -> mrlm_pl.Trainer:
    return mrlm_pl.Trainer(
        accelerator="cpu", limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False, **options
    )


def contents(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_each_fit_has_a_folder_of_its_own_named_like_the_algorithm() -> None:
    trainer = quiet(logger=False)
    trainer.fit(*parts())
    assert trainer.default_root_dir == "runs/grpo"
    first = contents("runs/grpo")
    assert Path("runs/grpo/policies/main/config.json") in first
    trainer.fit_loop.max_epochs = 2
    trainer.fit(*parts())
    quiet(logger=False).fit(*parts())
    with pytest.raises(ConfigurationError, match=r"has trained its trainer.max_epochs, 2, .*; make a new Trainer"):
        trainer.fit(*parts())
    assert contents("runs/grpo") == first
    assert sorted(path.name for path in Path("runs").iterdir()) == ["grpo", "grpo-2", "grpo-3"]
    trainer = quiet(output="runs/grpo", logger=False)
    with pytest.raises(ConfigurationError, match=r"runs/grpo holds a run; add `--resume` \(in Python `resume=True`\)"):
        trainer.fit(*parts())
    with pytest.raises(ConfigurationError, match="resume needs the folder of the run"):
        quiet(resume=True)
    with pytest.raises(ConfigurationError, match="output is ''; name a folder, or leave it out for `runs/NAME`"):
        quiet(output="")


def test_last_continues_and_a_validation_writes_below_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    quiet(output="mine").fit(*parts())
    algorithm, data = parts()
    trainer = mrlm_pl.Trainer(output="mine", accelerator="cpu", max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(algorithm, data, ckpt_path="last")
    assert (trainer.global_step, trainer.default_root_dir) == (2, "mine")
    trainer.validate(algorithm, data)
    assert Path("mine/validate/metrics.csv").is_file()
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.count(" "))
    assert lines["environment"] == "math (validation, seed 0)"
    assert lines["episodes"] == "2"
    assert lines["sampling"].startswith("temperature 1, ")
    assert lines["val/reward"] == lines["mean"].split()[1]
    assert trainer.default_root_dir == "mine"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_script_in_order(
    number: int, status: int, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Signal(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        quiet(callbacks=[Signal()], logger=False, max_epochs=2).fit(*parts())
    assert end.value.code == status
    assert "has ended fit; continue with `Trainer(output='runs/grpo', resume=True)`" in capsys.readouterr().err
    assert "Received" not in caplog.text
    assert signal.getsignal(number) is before
    trainer = quiet(output="runs/grpo", resume=True, logger=False, max_epochs=2)
    trainer.fit(*parts())
    assert trainer.global_step == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_script_s_own_handler_raises_ends_the_run_in_order(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python drops an exception in a ``__del__``, where a signal may arrive: the run did not stop."""

    class Dropping:
        def __del__(self) -> None:
            signal.raise_signal(number)

    class Signal(Callback):
        batches = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.batches += 1
            Dropping()

    def own(*_: Any) -> None:
        raise SystemExit(3)

    before = signal.signal(signal.SIGTERM, own)
    try:
        sending = Signal()
        with pytest.raises(SystemExit) as end:
            quiet(callbacks=[sending], logger=False, max_epochs=2).fit(*parts())
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (end.value.code, sending.batches) == (3, 1)
    assert "has ended fit; continue with `Trainer(output='runs/grpo', resume=True)`" in capsys.readouterr().err
    assert Path("runs/grpo/checkpoints/last.ckpt").is_file()


def test_an_interrupt_keeps_a_notebook_or_interpreter_alive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Signal(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt):
        quiet(callbacks=[Signal()], logger=False).fit(*parts())
    assert "Ctrl-C has ended fit; continue with" in capsys.readouterr().err


def test_a_failed_rollout_costs_no_update(capsys: pytest.CaptureFixture[str]) -> None:
    class Away(MathEnvironment):
        away = False

        def reset(self, task: Any) -> Any:
            if self.away and task.index >= 2:
                raise RuntimeError("the back end is away")
            return super().reset(task)

    def train(name: str, **options: Any) -> bytes:
        algorithm = mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)})
        data = mrlm_pl.RolloutDataModule(
            Away(difficulty=(1, 1)),
            groups=1,
            group_size=4,
            iterations=4,
            retries=0,
            sampling=mrlm_pl.Sampling(max_tokens=8),
        )
        trainer = quiet(output=f"runs/{name}", logger=False, **options)
        trainer.fit(algorithm, data)
        return Path(f"runs/{name}/policies/main/model.safetensors").read_bytes()

    Away.away = True
    with pytest.raises(RolloutError, match="every episode of iteration 2 failed, 4 in all"):
        train("failed")
    assert "failed; continue with `Trainer(output='runs/failed', resume=True)`" in capsys.readouterr().err
    assert torch.load("runs/failed/checkpoints/last.ckpt", weights_only=True)["global_step"] == 2
    Away.away = False
    assert train("failed", resume=True) == train("whole")


class Away(Logger):
    """A logger whose server answers 503."""

    name, version = "away", ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("503 Service Unavailable")

    save = after_save_checkpoint = finalize = log_metrics


@pytest.mark.parametrize("files", [0, 1])
def test_a_run_outlives_a_logger_that_fails(files: int, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(output="run", logger=[Away(), Away(), *[mrlm_pl.runs.MetricsFile("run")] * files], max_epochs=2)
    trainer.fit(*parts())
    assert trainer.global_step == 2
    with Path("run/metrics.csv").open(newline="") as file:
        assert len([row for row in csv.DictReader(file) if row["train/loss"]]) == 2
    warnings = [text for text in caplog.messages if "trainer.logger" in text]
    fault = "has failed with ConnectionError: 503 Service Unavailable; the run continues, and writes its metrics.csv"
    assert all(f"trainer.logger: Away.{name} {fault}" in " ".join(warnings) for name in ("log_metrics", "finalize"))
    assert len(warnings) == len(set(warnings)) * 2, "one for each logger and method"


@pytest.mark.parametrize("logger", [False, None])
def test_a_run_whose_folder_is_moved_ends_and_makes_no_other(logger: bool | None) -> None:
    class Move(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                Path("run").rename("elsewhere")

    trainer = quiet(output="run", logger=logger, callbacks=[Move()], max_epochs=3)
    with pytest.raises(StorageError, match=r"the run folder 'run' was moved or deleted .*; put it back"):
        trainer.fit(*parts())
    assert [path.name for path in Path().iterdir()] == ["elsewhere"], [*Path("run").rglob("*")]


def test_a_prediction_returns_the_episodes_that_it_writes(model_folder: Path) -> None:
    data = mrlm_pl.RolloutDataModule(
        MathEnvironment(), groups=1, validation_episodes=3, sampling=mrlm_pl.Sampling(max_tokens=2)
    )
    trainer = mrlm_pl.Trainer(output="run", enable_progress_bar=False, accelerator="cpu")
    batches: Any = trainer.predict(mrlm_pl.GRPO({"main": str(model_folder)}), data)
    (file,) = Path("run").rglob("episodes/*")
    assert [episode.id for batch in batches for episode in batch.episodes] == [
        episode.id for episode in mrlm_pl.read_episodes(file)
    ]
    assert sum(len(batch.episodes) for batch in batches) == 3


def test_a_prediction_of_something_else_is_returned(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Length(mrlm_pl.GRPO):
        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return torch.tensor(len(batch.episodes))

    data = mrlm_pl.RolloutDataModule(
        MathEnvironment(), groups=1, validation_episodes=3, sampling=mrlm_pl.Sampling(max_tokens=2)
    )
    trainer = mrlm_pl.Trainer(output="run", enable_progress_bar=False, accelerator="cpu")
    assert trainer.predict(Length({"main": str(model_folder)}), data) == [torch.tensor(3)]
    assert "episodes are in" not in capsys.readouterr().out


@pytest.mark.parametrize("data", [[{"prompt": "1+1="}], torch.utils.data.DataLoader([1, 2])])
def test_rows_in_place_of_a_data_module_are_refused(data: Any, model_folder: Path) -> None:
    trainer = mrlm_pl.Trainer(output="run", enable_progress_bar=False, accelerator="cpu")
    with pytest.raises(ConfigurationError, match=r"GRPO cannot train on a .*; give a data module: RolloutDataModule"):
        trainer.fit(mrlm_pl.GRPO({"main": str(model_folder)}), data)


def test_a_class_in_place_of_a_callback_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"is not a callback; call it: LastCheckpoint\(\)"):
        mrlm_pl.Trainer(callbacks=[mrlm_pl.LastCheckpoint])


def test_a_strategy_that_spawns_its_processes_is_refused_in_a_fit_alone() -> None:
    trainer = mrlm_pl.Trainer(strategy="ddp_spawn", accelerator="cpu", devices=2)  # it validates
    with pytest.raises(ConfigurationError, match=r"'spawn', which cannot .* set it to ddp"):
        trainer.fit(*parts())


def test_a_development_run_leaves_nothing() -> None:
    trainer = quiet(fast_dev_run=True)
    trainer.fit(*parts())
    assert list(Path().iterdir()) == []
    trainer.save_checkpoint("own.ckpt")
    assert torch.load("own.ckpt", weights_only=True)["logged_rows"] == {}, "its loggers hold no rows"


def test_a_second_development_run_names_its_setting() -> None:
    trainer, (algorithm, data) = quiet(fast_dev_run=2), parts()
    trainer.fit(algorithm, data)
    with pytest.raises(ConfigurationError, match=r"trainer\.fast_dev_run, 2, in an earlier fit, .*; make"):
        trainer.fit(algorithm, data)


def test_lightning_s_own_trainer_works_and_says_what_it_lacks() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, limit_val_batches=0, logger=False, enable_checkpointing=False
    )
    with pytest.warns(UserWarning, match=r"Lightning's own Trainer has no run folder.*mrlm_pl\.runs\.Trainer"):
        trainer.fit(*parts())
    assert Path("policies/main/config.json").is_file()


@pytest.mark.parametrize(
    ("load", "variables", "warned"), [(7.0, {}, True), (2.5, {}, False), (7.0, {"OMP_NUM_THREADS": "1"}, False)]
)
def test_a_busy_machine_is_named_with_the_remedy(
    load: float,
    variables: dict[str, str],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    console.warn_of_busy_machine()
    assert ("the load average is 7.0 on 2 cores" in caplog.text) == warned
    assert ("GOMP_SPINCOUNT=1000" in caplog.text) == warned


@pytest.mark.parametrize(("name", "value"), [("gradient_clip_val", -1), ("accumulate_grad_batches", 0)])
def test_numbers_out_of_range_are_refused_with_the_trainer(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"trainer\.{name} is {value}; it must be [01] or above"):
        mrlm_pl.Trainer(**{name: value})
