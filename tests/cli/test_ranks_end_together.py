"""SIGTERM to a run of two processes: both end after the same update, with a checkpoint from which they go on."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_ray import ROOT, alive, eventually, weights

FIT = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", "--config", "configs/quickstart.yaml"]
SHORT = {
    "--data.groups": "4",
    "--data.group_size": "4",
    "--data.iterations": "24",
    "--data.validation_episodes": "8",
    "--trainer.accelerator": "cpu",
    "--trainer.devices": "2",
    "--trainer.callbacks": "null",
    "--trainer.enable_progress_bar": "false",
    "--trainer.log_every_n_steps": "1",
}

pytestmark = pytest.mark.slow


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts short runs of two processes; all are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: str, *arguments: str) -> subprocess.Popen[str]:
        options = {**SHORT, "--trainer.default_root_dir": str(tmp_path / folder)}
        flat = [word for option in options.items() for word in option]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*FIT, *flat, *arguments]
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


def ended(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=180)
    print(output[-3000:])
    return process.returncode


def second_of(process: subprocess.Popen[str]) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(child) for child in children if b"mrlm_pl.cli.main" in Path(f"/proc/{child}/cmdline").read_bytes())


def collections(folder: Path) -> int:
    path = folder / "metrics.csv"
    if not path.exists():
        return 0
    with path.open() as file:
        return sum(bool(row.get("rollout/reward")) for row in csv.DictReader(file))


VALIDATED = ("--trainer.limit_val_batches", "1.0", "--trainer.val_check_interval", "1")  # after each batch
PIECES = ("--trainer.accumulate_grad_batches", "2")


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("the first", ("ddp",)),
        ("the second", ("ddp", *VALIDATED)),
        ("both", ("ddp", *PIECES)),
        ("the second", ("fsdp",)),
    ],
    ids=["first", "second, validated", "both, in pieces", "second, sharded"],
)
def test_both_end_and_go_on(told: str, options: tuple[str, ...], fit: Any, tmp_path: Path) -> None:
    options = ("--trainer.strategy", *options)
    assert ended(fit("whole", *options)) == 0
    process = fit("run", *options)
    eventually(lambda: collections(tmp_path / "run") >= 3, 120)
    second = second_of(process)
    processes = {"the first": [process.pid], "the second": [second]}
    processes["both"] = processes["the first"] + processes["the second"]
    for pid in processes[told]:
        os.kill(pid, signal.SIGTERM)
    assert ended(process) == 143
    eventually(lambda: not alive(second), 60)
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert 1 <= torch.load(checkpoint, weights_only=False)["global_step"] < 24
    assert ended(fit("run", *options, "--ckpt_path", "last")) == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert collections(tmp_path / "run") == collections(tmp_path / "whole") == 24
