"""The state that a run writes: running with signs of life, finished, interrupted, failed; a killed one has no end."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from mrlm_pl.errors import ConfigurationError, NonFiniteError, RolloutError
from mrlm_pl.runs import LastCheckpoint, Trainer
from mrlm_pl.runs.folder import last_checkpoint
from mrlm_pl.runs.state import SILENT_SECONDS, STATE, STOPPED, Training, in_training, running, state_of
from tests.support.runs.short_fits import make
from tests.support.servers.environment_servers import eventually

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}

ENDLESS = """
from lightning.pytorch import LightningModule
from mrlm_pl.runs import Trainer
import torch

class Endless(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch, index):
        open("began", "w").close()
        return self.weight * 1.0
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Ones(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(1)

Trainer(accelerator="cpu", output="run", max_steps=10**9, enable_progress_bar=False).fit(Endless(), Ones())
"""


def state(folder: Path) -> tuple[str, str]:
    path = folder / STATE
    return state_of(path.read_text() if path.exists() else "")


def test_a_fit_lives_then_is_finished(
    model_folder: Path, echo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mrlm_pl.runs.state.SIGN_SECONDS", 0.01)
    states, again = set(), []

    def sign() -> float:
        return float(json.loads((tmp_path / "run" / STATE).read_text())["alive"])

    class Looking(echo):
        def begin(self, task: Any) -> str:
            states.add(state(tmp_path / "run"))
            first = sign()
            eventually(lambda: sign() > first, 100)
            again.append("during a collection")
            return super().begin(task)

    Trainer(output=str(tmp_path / "run"), **QUIET).fit(*make(model_folder, Looking()))
    assert states == {("running", "")}
    assert again
    assert state(tmp_path / "run") == ("finished", "")
    record = json.loads((tmp_path / "run" / STATE).read_text())
    assert "process" not in record
    assert record["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(record["versions"]) == {"python", "mrlm", "torch", "transformers", "lightning"}


def test_a_failed_fit_says_why_and_a_refused_one_leaves_the_state(
    model_folder: Path, echo: Any, tmp_path: Path
) -> None:
    class Failing(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                raise NonFiniteError("the loss is nan")

    callbacks = [Failing(), LastCheckpoint(every_n_train_steps=1)]
    with pytest.raises(NonFiniteError):
        Trainer(output=str(tmp_path / "run"), callbacks=callbacks, **QUIET).fit(*make(model_folder, echo()))
    kind, reason = state(tmp_path / "run")
    assert (kind, "NonFiniteError: " in reason) == ("failed", True)
    with pytest.raises(ConfigurationError, match="holds a run"):
        Trainer(output=str(tmp_path / "run"), **QUIET).fit(*make(model_folder, echo()))
    assert state(tmp_path / "run") == (kind, reason)


def test_a_run_has_one_trainer(model_folder: Path, echo: Any, tmp_path: Path) -> None:
    other = Training(tmp_path / "run")  # another opening of the file: as in another process
    other.begin()
    assert in_training(tmp_path / "run")
    trainer = Trainer(output=str(tmp_path / "run"), resume=True, **QUIET)
    with pytest.raises(ConfigurationError, match=r"another process trains the run '.*run'; wait for its end"):
        trainer.fit(*make(model_folder, echo()))
    assert state(tmp_path / "run") == ("running", ""), "the refused trainer leaves the folder as it is"
    (tmp_path / "run" / "config.yaml").touch()
    with pytest.raises(ConfigurationError, match="another process trains"):
        trainer.fit(*make(model_folder, echo()))
    assert (tmp_path / "run" / "config.yaml").is_file(), "it moves nothing aside"
    other.end("failed", "x")
    other.release()
    assert not in_training(tmp_path / "run")
    trainer.fit(*make(model_folder, echo()))
    assert state(tmp_path / "run") == ("finished", "")
    assert not in_training(tmp_path / "run")


def test_a_run_that_failed_before_a_checkpoint_starts_again(model_folder: Path, echo: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 3\n")  # as `mrlm fit` writes it before the first iteration
    with pytest.raises(RolloutError):
        Trainer(output=str(folder), resume=True, **QUIET).fit(*make(model_folder, echo(fail_every=1)))
    assert state(folder)[0] == "failed"
    Trainer(output=str(folder), **QUIET).fit(*make(model_folder, echo(), iterations=1))
    assert state(folder) == ("finished", "")
    assert last_checkpoint(folder) is not None


def test_a_run_that_sigterm_ends_is_interrupted(model_folder: Path, echo: Any, tmp_path: Path) -> None:
    class Ended(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        Trainer(output=str(tmp_path / "run"), callbacks=[Ended()], **QUIET).fit(*make(model_folder, echo()))
    assert state(tmp_path / "run") == ("interrupted", "SIGTERM")


@pytest.mark.long
def test_a_killed_run_stopped_without_an_end(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ENDLESS], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: (tmp_path / "began").exists() or process.poll() is not None, 250)
        assert state(tmp_path / "run") == ("running", "")
        process.kill()
        process.wait(60)
        assert state(tmp_path / "run") == ("stopped without an end", "")
    finally:
        process.kill()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_state_that_cannot_be_written_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path)
    training.begin()

    def stale(*_: Any, **__: Any) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stale)
        training.end("failed", "RolloutError: of the run")
    training.release()
    assert state_of((tmp_path / STATE).read_text())[0] == "running", "the last one that could be written"


def test_a_process_that_its_parent_has_not_waited_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        began = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
        text = json.dumps({**running(), "process": process.pid, "began": began})
        assert state_of(text)[0] == "running"
        os.kill(process.pid, signal.SIGKILL)
        eventually(lambda: state_of(text)[0] == STOPPED, 100)
    finally:
        process.kill()
        process.wait(100)


def test_the_name_of_a_process_may_end_within_a_character() -> None:
    """Linux keeps 15 bytes of the name of an executable script."""
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes("a训练强化学习.py".encode())
        assert state_of(json.dumps(running()))[0] == "running"
    finally:
        name.write_bytes(before)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "running"),
        ({"began": "1"}, "stopped without an end"),  # a later process with the number
        ({"host": "other", "process": 2**22}, "running"),
        ({"host": "other", "alive": time.time() - SILENT_SECONDS - 5}, "stopped without an end"),
        ({"namespace": "pid:[1]", "process": 2**22}, "running"),  # in another container with the same host name
        ({"namespace": "pid:[1]", "alive": time.time() - SILENT_SECONDS - 5}, "stopped without an end"),
        ({"process": 2**22}, "stopped without an end"),
        ({"process": "x"}, "unknown"),
        ({"state": "finished"}, "finished"),
    ],
)
def test_a_process_lives_where_it_can_be_seen(changes: dict[str, Any], expected: str) -> None:
    assert running()["host"] == socket.gethostname()
    assert state_of(json.dumps({**running(), "alive": time.time(), **changes}))[0] == expected
