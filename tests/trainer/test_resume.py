"""Resumed runs train as many batches as their configuration says."""

from __future__ import annotations

import csv
import json
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.algorithms import GRPO, SFT
from mrlm_pl.data import RolloutDataModule, TrajectoryDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.runs import LastCheckpoint, Trainer
from mrlm_pl.runs.state import state_in


class Batches(Callback):
    """Notes the epoch and the number of updates at the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        self.seen.append((trainer.current_epoch, trainer.global_step))


class StopsAtOnce(Callback):
    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        trainer.should_stop = True

    def on_train_start(self, trainer: Any, algorithm: Any) -> None:
        trainer.should_stop = trainer.global_step > 0


@pytest.mark.parametrize(("limit", "after"), [(3, 6), (1.0, 6), (1.0, 2), (2, 4)])
@pytest.mark.long_after(1)
def test_an_epoch_may_have_another_length_after_a_resume(
    limit: int | float, after: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Epoch 0 has ``limit`` of 6 batches, epoch 1 of the resumed run ``after``."""

    def fit(limit: int | float, epochs: int, checkpoint: Path | None = None) -> Batches:
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=3, minibatches=2, sampling=Sampling(max_tokens=3)
        )
        batches = Batches()
        trainer = quiet_trainer(max_epochs=epochs, limit_train_batches=limit, callbacks=[batches])
        trainer.fit(GRPO({"main": Policy(str(model_folder))}), data, ckpt_path=checkpoint, weights_only=False)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        return batches

    first = fit(limit, 1)
    done = 6 if limit == 1.0 else int(limit)
    assert first.seen == [(0, step) for step in range(1, done + 1)]
    resumed = fit(after, 2, tmp_path / "end.ckpt")
    assert resumed.seen == [(1, step) for step in range(done + 1, done + after + 1)]


@pytest.mark.long
def test_a_finished_run_with_more_iterations_equals_one_that_had_them_from_the_start(
    model_folder: Path, echo: Any, tmp_path: Path
) -> None:
    def fit(folder: str, iterations: int, **options: Any) -> Any:
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=iterations, minibatches=2, sampling=Sampling(max_tokens=3)
        )
        model = GRPO({"main": Policy(str(model_folder), learning_rate=0.1)})
        quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
        trainer = Trainer(output=str(tmp_path / folder), **quiet, **options)
        trainer.fit(model, data)
        return torch.load(tmp_path / folder / "checkpoints/last.ckpt", weights_only=True)

    fit("run", 2)
    longer, whole = fit("run", 5, resume=True), fit("whole", 5)
    assert longer["global_step"] == 10
    assert longer["loops"]["fit_loop"] == whole["loops"]["fit_loop"]
    assert all(torch.equal(weight, longer["state_dict"][name]) for name, weight in whole["state_dict"].items())
    with pytest.raises(ConfigurationError, match="is 4, but the checkpoint has completed 5 in epochs of 5"):
        fit("run", 4, resume=True)
    assert state_in(tmp_path / "run") == ("finished", ""), "a rejected resume leaves the run as it was"
    assert fit("run", 5, resume=True, max_epochs=2)["global_step"] == 20
    with pytest.raises(ConfigurationError, match=r"resume with data\.iterations 5, and raise trainer\.max_epochs"):
        fit("run", 12, resume=True)


@pytest.mark.parametrize(
    ("before", "configured", "kept"), [("constant", 0.1, 0.05), ("constant", 0.2, 0.2), ("linear", 0.1, 0.1)]
)
def test_a_rate_that_a_callback_changed_survives_a_resume_unless_another_is_configured(
    before: Any, configured: float, kept: float, model_folder: Path, echo: Any, tmp_path: Path
) -> None:
    class Halves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 1:
                for group in trainer.optimizers[0].param_groups:
                    group["lr"] /= 2

    def fit(iterations: int, rate: float, schedule: Any = "constant") -> float:
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=iterations, sampling=Sampling(max_tokens=3))
        quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
        trainer = Trainer(output=str(tmp_path / "run"), resume=True, callbacks=[Halves()], **quiet)
        policies = {"main": Policy(str(model_folder), learning_rate=rate)}
        trainer.fit(GRPO(policies, optimization={"schedule": schedule}), data)
        return float(trainer.callback_metrics["train/learning_rate"])

    fit(2, 0.1, before)
    assert fit(3, configured) == pytest.approx(kept)


@pytest.mark.long_after(1)
@pytest.mark.parametrize("last", [2, 3, 6])
def test_every_epoch_ends_once_where_a_signal_came_after_its_last_batch(
    last: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    seen = []

    class Epochs(Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            seen.append((trainer.current_epoch, trainer.global_step))

    class Ends(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == last:
                raise SIGTERMException

    def fit(callbacks: list[Callback], checkpoint: Path | None = None) -> None:
        sampling = Sampling(max_tokens=3)
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, minibatches=2, sampling=sampling)
        kept = LastCheckpoint()
        kept.dirpath = str(tmp_path)
        callbacks = [Epochs(), *callbacks, kept]
        trainer = quiet_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(GRPO({"main": Policy(str(model_folder))}), data, ckpt_path=checkpoint)

    with pytest.raises(SIGTERMException):
        fit([Ends()])
    fit([], tmp_path / "last.ckpt")
    assert seen == [(0, 2), (1, 4), (2, 6)]
    fit([], tmp_path / "last.ckpt")
    assert len(seen) == 3, "the end of a complete run's last epoch does not repeat"


def test_a_checkpoint_within_a_batch_says_that_it_is_not_exact(echo: Any, quiet_trainer: Any, tmp_path: Path) -> None:
    class Saves(Callback):
        def on_after_backward(self, trainer: Any, module: Any) -> None:
            with pytest.warns(UserWarning, match=r"saved within a batch.*last\.ckpt` resumes exactly"):
                trainer.save_checkpoint(tmp_path / "within.ckpt")

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                trainer.save_checkpoint(tmp_path / "after.ckpt")

    data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=3))
    quiet_trainer(callbacks=[Saves()]).fit(GRPO({"main": Policy("builtin:tiny")}), data)
    assert (tmp_path / "after.ckpt").is_file()


@pytest.mark.parametrize(
    ("bound", "then", "told"),
    [
        ({}, {}, "complete; raise data.iterations to"),
        ({"max_epochs": 2}, {"max_epochs": 2}, "complete; raise trainer.max_epochs to"),
        (
            {"limit_train_batches": 0.5},
            {"limit_train_batches": 0.5},
            "limit_train_batches, 0.5; raise trainer.max_epochs",
        ),
        ({"limit_train_batches": 1}, {}, "limit_train_batches of the run before; raise trainer.max_epochs"),
        (
            {"callbacks": StopsAtOnce()},
            {"callbacks": StopsAtOnce()},
            "complete, stopped by a callback after 1 of 4 iterations; change that callback to",
        ),
        ({"max_steps": 1}, {"max_steps": 1}, "complete by trainer.max_steps, 1; raise it to"),
        ({"max_time": {"seconds": 0.01}}, {"max_time": {"seconds": 0.01}}, "complete by trainer.max_time; raise it to"),
    ],
)
@pytest.mark.long_after(2)
def test_a_complete_run_names_the_bound_that_has_ended_it(
    bound: dict[str, Any], then: dict[str, Any], told: str, echo: Any, tmp_path: Path, capsys: Any
) -> None:
    def fit(iterations: int, **options: Any) -> str:
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=iterations, sampling=Sampling(max_tokens=3), save_episodes=False
        )
        quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
        Trainer(output=str(tmp_path / "run"), **quiet, **options).fit(GRPO({"main": Policy("builtin:tiny")}), data)
        return capsys.readouterr().out

    first = fit(2, **bound)
    assert "nothing was trained" not in first
    assert ("stopped by trainer.max_time after" in first) == ("max_time" in bound)
    assert told in fit(2 if told.startswith("complete; ") else 4, resume=True, **then)


@pytest.mark.parametrize("acts_after", ["epoch", "validation"])
@pytest.mark.parametrize(
    ("first", "then", "updates"),
    [
        ({"patience": 2}, {"patience": 4}, [3, 3, 5, 5]),
        ({"stopping_threshold": 2, "mode": "max"}, {"stopping_threshold": 4, "mode": "max"}, [3, 3, 5, 5]),
        ({"divergence_threshold": 2, "patience": 3}, {"divergence_threshold": 9, "patience": 3}, [3, 3, 4, 4]),
    ],
)
@pytest.mark.long_after(1)
def test_a_run_that_early_stopping_has_stopped_goes_on_with_other_limits_alone(
    acts_after: str, first: dict[str, Any], then: dict[str, Any], updates: list[int], echo: Any, tmp_path: Path
) -> None:
    def fit(limits: dict[str, Any]) -> int:
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=3))
        stopping = EarlyStopping("trained", check_on_train_epoch_end=acts_after == "epoch", **limits)
        quiet: dict[str, Any] = {"accelerator": "cpu", "num_sanity_val_steps": 0, "enable_progress_bar": False}
        trainer = Trainer(output=str(tmp_path), resume=True, max_epochs=9, callbacks=[stopping], **quiet)
        trainer.fit(Worse({"main": Policy("builtin:tiny")}), data)
        return trainer.global_step

    assert [fit(limits) for limits in (first, first, then, then)] == updates


class Worse(GRPO):
    def on_train_batch_end(self, *arguments: Any) -> None:
        self.log("trained", float(self.global_step))


class FailsInValidation(Callback):
    """Fails as a validation begins after the given number of updates; notes those after which one has ended."""

    def __init__(self, fails_after: int, error: type[Exception] = RuntimeError) -> None:
        self.fails_after, self.error, self.validated = fails_after, error, list[int]()

    def on_validation_start(self, trainer: Any, algorithm: Any) -> None:
        if trainer.global_step == self.fails_after:
            raise self.error("the power is off")

    def on_validation_end(self, trainer: Any, algorithm: Any) -> None:
        self.validated.append(trainer.global_step)


@pytest.mark.parametrize(
    ("fails_after", "error", "max_steps", "validated"),
    [
        (2, RuntimeError, -1, [2, 4]),
        (4, RuntimeError, -1, [4]),
        (2, RuntimeError, 2, [2]),
        (4, SIGTERMException, -1, [4]),
        (2, SIGTERMException, 2, [2]),
        (0, RuntimeError, -1, []),
        (0, RuntimeError, 2, []),
    ],
)
@pytest.mark.long_after(1)
def test_a_validation_that_a_kill_interrupts_is_played_by_the_resumed_run(
    fails_after: int, error: type[Exception], max_steps: int, validated: list[int], echo: Any, tmp_path: Path
) -> None:
    """Each second of 4 updates is validated, after its checkpoint is saved; a finished run is not validated again."""

    def fit(fails_after: int, resume: bool) -> list[int]:
        sampling = Sampling(max_tokens=3)
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=4, sampling=sampling, validation_episodes=2, save_episodes=False
        )
        validations = FailsInValidation(fails_after, error)
        own: dict[str, Any] = {
            "callbacks": [validations, LastCheckpoint(every_n_train_steps=1)],
            "max_steps": max_steps,
        }
        quiet: dict[str, Any] = {"accelerator": "cpu", "num_sanity_val_steps": 0, "enable_progress_bar": False}
        trainer = Trainer(output=str(tmp_path / "run"), resume=resume, val_check_interval=2, **own, **quiet)
        trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data)
        return validations.validated

    with pytest.raises((RuntimeError, SystemExit)) if fails_after else nullcontext():
        fit(fails_after, resume=False)
    assert [fit(0, resume=True), fit(0, resume=True)] == [validated, []]
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [(row["step"], "val" if row["val/reward"] else "train") for row in csv.DictReader(file)]
    whole = [("0", "train"), ("1", "train"), ("1", "val"), ("2", "train"), ("3", "train"), ("3", "val")]
    assert rows == (whole[:3] if max_steps == 2 else whole)


class Falls(Callback):
    """Lets the monitored metric fall from validation to validation."""

    def on_validation_epoch_end(self, trainer: Any, algorithm: Any) -> None:
        algorithm.log("falls", -float(trainer.global_step))


@pytest.mark.parametrize(("validates", "interval"), [(True, 1), (True, timedelta(0)), (False, 1)])
def test_validations_of_each_batch_stop_a_run_and_keep_its_best_checkpoint(
    validates: bool, interval: int | timedelta, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    watched: dict[str, Any] = {"monitor": "falls" if validates else "train/loss", "mode": "max"}
    stopping, best = EarlyStopping(**watched, patience=2), ModelCheckpoint(tmp_path, **watched, filename="{step}")
    data = RolloutDataModule(
        echo(), groups=2, group_size=2, iterations=5, sampling=Sampling(max_tokens=3), validation_episodes=2
    )
    callbacks = [*([Falls()] if validates else []), stopping, best]
    options = {"limit_val_batches": 1.0 if validates else 0, "val_check_interval": interval}
    trainer = quiet_trainer(callbacks=callbacks, enable_checkpointing=True, **options)
    trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data)
    assert trainer.global_step == (3 if validates else 5)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"step={1 if validates else 5}.ckpt"]
    # The callbacks may have another trainer next, without validations.
    assert (stopping._check_on_train_epoch_end, best._save_on_train_epoch_end) == (None, None)


def test_callbacks_see_the_metrics_of_a_rollout_that_was_collected_before_the_resume(
    echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """The metrics of a rollout are logged with its first update."""

    class Seen(Callback):
        def __init__(self) -> None:
            self.rewards: list[float] = []

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.rewards.append(float(trainer.callback_metrics["rollout/reward"]))

    def fit(checkpoint: Path | None) -> list[float]:
        seen, saver = Seen(), ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=3), passes=2
        )
        trainer = quiet_trainer(callbacks=[seen, saver], enable_checkpointing=True)
        trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data, ckpt_path=checkpoint)
        return seen.rewards

    whole = fit(None)
    assert fit(tmp_path / "step=1.ckpt") == whole[1:]


@pytest.mark.long_after(1)
def test_a_validation_that_was_all_a_run_had_left_is_saved_in_its_epoch(echo: Any, tmp_path: Path) -> None:
    class Ends(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            raise SIGTERMException

    def fit(folder: str, *callbacks: Callback) -> Any:
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=3))
        quiet: dict[str, Any] = {"accelerator": "cpu", "num_sanity_val_steps": 0, "enable_progress_bar": False}
        trainer = Trainer(output=str(tmp_path / folder), resume=True, callbacks=list(callbacks), **quiet)
        with pytest.raises(SystemExit) if callbacks else nullcontext():
            trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data)
        return torch.load(tmp_path / folder / "checkpoints/last.ckpt", weights_only=True)["epoch"]

    fit("ended", Ends())
    assert fit("ended") == fit("whole")


def test_without_validation_rows_callbacks_act_at_the_end_of_an_epoch(quiet_trainer: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "completion": "4"}) + "\n")
    watched: dict[str, Any] = {"monitor": "train/loss", "mode": "max"}
    stopping, best = EarlyStopping(**watched, patience=1), ModelCheckpoint(tmp_path, **watched, filename="{step}")
    options: dict[str, Any] = {"limit_val_batches": 1.0, "val_check_interval": 1, "enable_checkpointing": True}
    trainer = quiet_trainer(callbacks=[stopping, best], max_epochs=3, **options)
    data = TrajectoryDataModule(str(tmp_path / "rows.jsonl"))
    trainer.fit(SFT({"main": Policy("builtin:tiny", learning_rate=0.01)}), data)
    assert trainer.global_step == 2, "the loss falls"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=1.ckpt"]


@pytest.mark.long_after(1)
def test_a_resumed_run_validates_after_the_epochs_that_a_whole_one_does(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2+2?", "completion": "4"}) + "\n")
    file, quiet = str(tmp_path / "rows.jsonl"), {"num_sanity_val_steps": 0, "enable_progress_bar": False}

    def fit(epochs: int) -> list[int]:
        seen, run = FailsInValidation(0), {"output": str(tmp_path / "run"), "resume": True, "max_epochs": epochs}
        own: dict[str, Any] = {**run, **quiet, "accelerator": "cpu", "callbacks": [seen]}
        trainer = Trainer(check_val_every_n_epoch=2, limit_val_batches=1.0, **own)
        trainer.fit(SFT({"main": Policy("builtin:tiny")}), TrajectoryDataModule(file, file))
        return seen.validated

    assert [fit(epochs) for epochs in (1, 2, 3, 3, 4)] == [[], [2], [], [], [4]]


@pytest.mark.parametrize(("before", "after", "rates"), [(3, 1, [0.5, 0.25]), (1, 3, [6 / 12, 5 / 12])])
def test_a_run_with_other_passes_validates_and_decays_by_the_fraction_of_its_rollouts(
    before: int, after: int, rates: list[float], echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """The checkpoint is of the second of 4 iterations, after its validation."""
    seen: list[float] = []

    class Rates(FailsInValidation):
        def on_train_batch_start(self, trainer: Any, *arguments: Any) -> None:
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    def fit(passes: int, checkpoint: Path | None, **options: Any) -> list[int]:
        data = RolloutDataModule(
            echo(), groups=2, group_size=2, iterations=4, sampling=Sampling(max_tokens=3), passes=passes,
            validation_episodes=2, max_lag=0,
        )  # fmt: skip
        validations = Rates(0)
        callbacks = [validations, ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_epochs=1)]
        options |= {"val_check_interval": 2 * passes, "limit_val_batches": 1.0, "enable_checkpointing": True}
        model = GRPO({"main": Policy("builtin:tiny", learning_rate=1.0)}, optimization={"schedule": "linear"})
        quiet_trainer(callbacks=callbacks, **options).fit(model, data, ckpt_path=checkpoint)
        return validations.validated

    assert fit(before, None, max_steps=2 * before) == [2 * before]
    seen.clear()
    whole = 2 * before + 2 * after
    assert fit(after, tmp_path / f"step={2 * before}.ckpt") == [whole]
    assert [seen[0], seen[1]] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup"])
@pytest.mark.long_after(1)
def test_a_longer_run_says_once_that_its_learning_rate_rises_again(
    schedule: Any, echo: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    def fit(iterations: int, **options: Any) -> int:
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=iterations, sampling=Sampling(max_tokens=3))
        model = GRPO({"main": Policy("builtin:tiny", learning_rate=0.1)}, optimization={"schedule": schedule})
        quiet: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "enable_progress_bar": False}
        Trainer(output=str(tmp_path / "run"), **quiet, **options).fit(model, data)
        return sum("decayed to 0 at the end of the run, and is 0.05 again" in str(item.message) for item in recwarn)

    assert fit(2) == 0
    assert fit(2, resume=True) == 0, "the run is not longer"
    assert fit(4, resume=True) == (schedule != "constant_with_warmup")
