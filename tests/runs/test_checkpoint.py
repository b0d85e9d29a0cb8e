"""Intervals at which the last checkpoint is replaced by default, and the ends of a run that replace it."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, model_checkpoint

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import (
    ConfigurationError,
    EngineError,
    NonFiniteError,
    RemoteTimeoutError,
    RolloutError,
    StorageError,
)
from mrlm_pl.policy import Policy
from mrlm_pl.runs import Trainer, checkpoint
from mrlm_pl.runs.checkpoint import DurableCheckpointIO, LastCheckpoint


class Clock:
    """A clock that batches and saves move."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def saves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batch: float, save: float, until: float) -> list[float]:
    """Return the seconds at which a run saves, given the seconds of a batch and of a save."""
    clock, found = Clock(), list[float]()
    for module in (model_checkpoint, checkpoint):
        monkeypatch.setattr(module, "time", clock)
    last = LastCheckpoint()
    last.dirpath = str(tmp_path)

    def write(trainer: Any, *arguments: Any) -> None:
        found.append(clock.now)
        clock.now += save
        last._last_global_step_saved = trainer.global_step

    monkeypatch.setattr(last, "_save_topk_checkpoint", lambda trainer, metrics: write(trainer))
    monkeypatch.setattr(last, "_save_last_checkpoint", lambda trainer, metrics: None)
    monkeypatch.setattr(last, "_should_skip_saving_checkpoint", lambda trainer: False)
    monkeypatch.setattr(last, "_monitor_candidates", lambda trainer: {})
    monkeypatch.setattr(checkpoint, "inside_update", lambda trainer: False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(is_last_batch=False)))
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer: Any = SimpleNamespace(global_step=0, max_steps=-1, strategy=strategy, fit_loop=loop)
    module = SimpleNamespace(automatic_optimization=True)
    last.on_train_start(trainer, module)  # type: ignore[arg-type]
    while clock.now < until:
        clock.now += batch
        trainer.global_step += 1
        last.on_train_batch_end(trainer, module, None, None, 0)
    return found


def test_intervals_double_up_to_ten_minutes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = saves(monkeypatch, tmp_path, batch=1.0, save=0.0, until=3000)
    assert found == [15, 45, 105, 225, 465, 945, 1545, 2145, 2745]


def test_a_slow_save_is_repeated_after_twenty_times_its_duration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = saves(monkeypatch, tmp_path, batch=1.0, save=4.0, until=700)
    # Lightning counts from the beginning of a save.
    assert found == [15, 95, 255, 575]


def test_intervals_that_are_set_stay(tmp_path: Path) -> None:
    last = LastCheckpoint(minutes=3)
    assert last._train_time_interval == timedelta(minutes=3)
    assert not last._grows


@pytest.mark.parametrize("minutes", [-1, math.nan, math.inf])
def test_an_interval_that_is_no_time_is_refused(minutes: float) -> None:
    with pytest.raises(ConfigurationError, match=f"LastCheckpoint: minutes is {minutes}; it must be 0 or above"):
        LastCheckpoint(minutes=minutes)


@pytest.mark.parametrize(
    "saver",
    [
        LastCheckpoint(every_n_train_steps=2),
        LastCheckpoint(minutes=3),
        LastCheckpoint(),
        ModelCheckpoint(save_last=True, monitor="rollout/reward", every_n_train_steps=2),
    ],
)
@pytest.mark.long_after(1)
def test_the_end_of_a_run_is_saved_beside_any_interval(saver: ModelCheckpoint, echo: Any, tmp_path: Path) -> None:
    """Else a longer run repeats the updates since the last interval, and a shorter one than that begins from zero."""
    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=4, sampling=Sampling(max_tokens=3))
    quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
    trainer = Trainer(output=str(tmp_path / "run"), max_steps=3, callbacks=[saver], **quiet)
    trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data)
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3


def test_save_last_does_not_replace_the_checkpoint_of_the_run(echo: Any, tmp_path: Path) -> None:
    class Killed(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("killed")

    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=4, sampling=Sampling(max_tokens=3))
    quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
    weights = ModelCheckpoint(save_last=True, save_weights_only=True, every_n_train_steps=1)
    callbacks = [Killed(), LastCheckpoint(every_n_train_steps=2), weights]
    with pytest.raises(RuntimeError, match="killed"):
        Trainer(output=str(tmp_path / "run"), callbacks=callbacks, **quiet).fit(
            GRPO({"main": Policy("builtin:tiny")}), data
        )
    assert torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["optimizer_states"]


@pytest.mark.parametrize(
    ("end", "processes", "begun", "saved"),
    [
        (RolloutError("all failed"), 1, 2, True),
        (EngineError("the server is away"), 1, 2, True),
        (RemoteTimeoutError("late"), 1, 2, True),
        (RolloutError("all failed"), 2, 2, False),  # the other process may not have failed
        (RolloutError("all failed"), 1, 3, False),  # within a batch
        (NonFiniteError("weights are NaN"), 1, 2, False),  # which would replace the last good ones
        (StorageError("the disk is full"), 1, 2, False),
        (KeyError("a bug"), 1, 2, False),
    ],
)
def test_a_failed_rollout_saves_and_other_errors_keep_the_checkpoint_before(
    end: Exception, processes: int, begun: int, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, found = LastCheckpoint(), list[Any]()
    monkeypatch.setattr(last, "_save_checkpoint", lambda trainer, path: found.append(path))
    monkeypatch.setattr(checkpoint, "inside_update", lambda trainer: False)
    current = SimpleNamespace(ready=begun, completed=2)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=SimpleNamespace(current=current)))
    trainer: Any = SimpleNamespace(
        state=SimpleNamespace(fn="fit"), sanity_checking=False, fit_loop=loop, world_size=processes, global_step=2
    )
    trainer.fast_dev_run = False
    last.dirpath = "run"
    last.on_exception(trainer, SimpleNamespace(), end)  # type: ignore[arg-type]
    assert bool(found) == saved


def test_a_first_checkpoint_that_cannot_be_written_speaks_of_none_before(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written: [^;]*; free space on the disk, then resume the run"):
        DurableCheckpointIO().save_checkpoint({}, tmp_path / "file" / "last.ckpt")


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {},
        {"state_dict": {"w": torch.ones(1)}},
        {"state_dict": None, "pytorch-lightning_version": "2.5.0"},
    ],
)
def test_a_file_of_something_else_is_no_checkpoint(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' is not a checkpoint of Lightning"):
        DurableCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")


def test_a_checkpoint_with_another_bit_in_its_weights_is_refused(tmp_path: Path) -> None:
    path, files = tmp_path / "last.ckpt", DurableCheckpointIO()
    files.save_checkpoint({"state_dict": {"w": torch.full((9,), 7.25)}, "pytorch-lightning_version": "2.5.0"}, path)
    assert files.load_checkpoint(path)["state_dict"]["w"].tolist() == [7.25] * 9
    content = bytearray(path.read_bytes())
    content[content.index(np.full(9, 7.25, np.float32).tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' is damaged: .*data/0' has another checksum; restore"):
        files.load_checkpoint(path)
    content[content.rindex(b"PK\x01\x02")] ^= 1  # a header of the table of records
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' is damaged: BadZipFile: .*; restore"):
        files.load_checkpoint(path)


def test_a_checkpoint_without_checksums_is_read(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": {"w": torch.ones(9)}, "pytorch-lightning_version": "2.5.0"}, path)
    finally:
        torch.serialization.set_crc32_options(before)
    assert DurableCheckpointIO().load_checkpoint(path)["state_dict"]["w"].tolist() == [1.0] * 9


def test_a_checkpoint_of_weights_alone_continues_no_run() -> None:
    algorithm = GRPO(policies={"main": Policy(random_init_seed=0)})
    state, strategy = SimpleNamespace(fn="fit"), SimpleNamespace(lightning_restore_optimizer=True)
    algorithm._trainer = SimpleNamespace(state=state, strategy=strategy, datamodule=None)  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="not the optimizer's state"):
        algorithm.on_load_checkpoint({"state_dict": {}, "optimizer_states": []})
