"""SIGTERM to a run of two processes: both end after the same update, with a checkpoint to resume from."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.runs.state import state_in
from tests.engines.ray.test_real_ray import alive, eventually, weights
from tests.support.runs.short_runs import ShortRuns

SHORT = {
    "--data.groups": "4",
    "--data.group_size": "4",
    "--data.iterations": "24",
    "--data.validation_episodes": "8",
    "--trainer.devices": "2",
    "--trainer.log_every_n_steps": "1",
}

pytestmark = pytest.mark.slow


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts short runs of two processes; all are ended with the test."""
    runs = ShortRuns(tmp_path, "configs/quickstart.yaml", SHORT)
    yield runs.start
    runs.end()


def ended(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=180)
    print(output[-20000:])  # both processes speak
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
def test_all_ranks_end_at_a_signal_to_any_of_them_and_the_run_resumes(
    told: str, options: tuple[str, ...], fit: Any, tmp_path: Path
) -> None:
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


SCRIPT = """
import sys
import time
from contextlib import suppress
from pathlib import Path

import mrlm_pl
from lightning.pytorch import Callback
from mrlm_environments import MathEnvironment


class Refuses(Callback):
    def on_train_start(self, trainer, algorithm):
        raise ValueError("of an earlier run")


class SlowFirst(Callback):
    def on_train_end(self, trainer, algorithm):
        time.sleep(trainer.is_global_zero)

    def on_train_batch_end(self, trainer, *_):
        if sys.argv[2:] == [str(trainer.global_rank)]:
            raise ValueError("the judge is away")


environment, sampling = MathEnvironment(difficulty=[1, 1]), mrlm_pl.Sampling(max_tokens=4)
data = mrlm_pl.RolloutDataModule(environment, groups=2, group_size=2, iterations=1, sampling=sampling)
quiet = {"limit_val_batches": 0, "enable_progress_bar": False, "accelerator": "cpu"}
for output, callback in (("earlier", Refuses()), (sys.argv[1], SlowFirst())):
    trainer = mrlm_pl.Trainer(output=output, strategy="ddp", devices=2, callbacks=[callback], **quiet)
    with suppress(ValueError if output == "earlier" else ()):
        trainer.fit(mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny")}), data)
report = mrlm_pl.evaluate(sys.argv[1], environment, num_episodes=2, sampling=sampling)
Path(sys.argv[1], f"rank-{trainer.global_rank}").write_text(report.checkpoint)
"""


def test_each_rank_of_a_script_reads_the_finished_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    subprocess.run([sys.executable, "train.py", "run"], cwd=tmp_path, check=True, timeout=180)
    assert [(tmp_path / "run" / f"rank-{rank}").read_text() for rank in (0, 1)] == ["", ""], "the exported weights"


def test_the_error_of_one_rank_is_that_of_the_run(tmp_path: Path) -> None:
    """The first rank, which writes the state of the run, saw a connection closed by its peer."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", "run", "1"],
        cwd=tmp_path,
        timeout=180,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode
    fault = "rank 1 has failed with ValueError: the judge is away"
    assert state_in(tmp_path / "run") == ("failed", f"MRLMError: {fault}")
    assert f"mrlm_pl.errors.MRLMError: {fault}" in done.stderr
