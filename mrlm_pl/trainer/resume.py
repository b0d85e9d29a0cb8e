"""The division of a resumed run between its checkpoint and its configuration.

The trainer's progress comes from the checkpoint, in one form whichever hook saved it, so that no batch is repeated.
Lightning counts epochs and batches in about 40 numbers and infers from their differences at which hook a checkpoint
was saved. After a resume from a checkpoint of an epoch's last batch it does not count the beginning of the next epoch,
so that a second resume repeats batches that the data module has passed. Here every checkpoint holds the numbers that
an uninterrupted run has at the end of its last batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.trainer.bounds import updates_served

_VERSION = "pytorch-lightning_version"

NO_OPTIMIZER = (
    "ckpt_path: the checkpoint holds weights, but not the optimizer's state; name another, or give the policy's folder "
    "as `model`"
)

PLAIN_TRAINER = (
    "Lightning's own Trainer has no run folder: `episodes` and `policies` are written to its `default_root_dir` (by "
    "default the working folder), where the next fit overwrites them; a kill may leave half a checkpoint. "
    "`mrlm_pl.runs.Trainer` takes the same arguments and has a folder for each run, durable checkpoints, a metrics "
    "file and a clean shutdown on Ctrl-C"
)

RISES_AGAIN = (
    "the learning rate had decayed to 0 at the end of the run, and is {:g} again now that the run is longer: the "
    "result differs from that of a run which had this length from the start; for that result train a new run. Runs "
    "with `model.optimization.schedule: constant` can be continued at any time"
)


WITHIN_BATCH = (
    "this checkpoint is saved within a batch: a run that resumes from it leaves this batch out, and differs from an "
    "uninterrupted one; `checkpoints/last.ckpt` resumes exactly"
)


def check_checkpoint(content: Any, path: str | Path) -> None:
    """Validate that the content of a file is a checkpoint.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict) or _VERSION not in content:
        raise ConfigurationError(
            f"ckpt_path: {str(path)!r} is not a checkpoint of Lightning, with `{_VERSION}` and `state_dict`; name "
            "another; a model's folder is given as `model` of a policy"
        )


@runtime_checkable
class ResumedLogger(Protocol):
    """A logger that replaces the rows which a resumed run repeats.

    Attributes:
        rows: number of rows that the logger holds.
    """

    rows: int

    def resume_at(self, step: int, rows: int) -> None:
        """Keep the rows of a checkpoint, and later ones at earlier steps than this."""


class ExactResume(Callback):
    """Saves and restores the trainer's progress exactly, and keeps the configured optimizer settings.

    Torch restores learning rates, weight decay and betas with the optimizer's state, over the configured ones.
    :class:`~mrlm_pl.learner.algorithm.Algorithm` brings this callback along.

    Attributes:
        validated: number of the run's batches at its last validation. A checkpoint of a batch that a validation follows
            is saved before that validation; the resumed run begins with it if it was not completed.
        ended: number of epochs whose end the callbacks have processed. A checkpoint of the last batch may be saved
            before it.
    """

    validated, ended = 0, 0.0
    _metrics: Mapping[str, float] = {}
    _patience: Mapping[EarlyStopping, int] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches at the last validation, and of ended epochs."""
        return {"validated": self.validated, "ended": self.ended}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the value of :meth:`state_dict`."""
        self.validated, self.ended = state_dict["validated"], state_dict.get("ended", math.inf)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the epoch has ended, before callbacks that save checkpoints."""
        self.ended = trainer.current_epoch + 1

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the weights after the last batch are validated."""
        self.validated = trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let a finished run that is resumed end as the first one did, with ``on_train_end``.

        Also warn of parts of a run that Lightning's own trainer lacks.
        """
        if stage == "fit" and type(trainer) is Trainer and trainer.is_global_zero:
            warnings.warn(PLAIN_TRAINER, stacklevel=2)
        if stage == "fit" and not isinstance(trainer.fit_loop, _EndingFitLoop):
            loop = _EndingFitLoop(trainer, trainer.min_epochs, trainer.max_epochs)
            vars(loop).update(vars(trainer.fit_loop))
            trainer.fit_loop = loop
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._patience = {item: item.patience for item in callbacks if isinstance(item, EarlyStopping)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the configured settings back, and begin a new epoch after the last batch of one, with its hooks.

        Also run the validation that the earlier run did not complete.
        """
        loop = trainer.fit_loop
        if loop.is_resuming:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self._metrics.items()})
            self._restore_settings(trainer)
            self._stop_again(trainer)
            self._validate(trainer)
        if loop.restarted_mid_epoch and loop.epoch_loop.batch_progress.is_last_batch:
            if self.ended < loop.epoch_progress.current.completed:
                counts: Any  # of processed epochs too, as Lightning's types do not say
                for counts in (loop.epoch_progress.total, loop.epoch_progress.current):
                    counts.processed, counts.completed = counts.processed - 1, counts.completed - 1
                loop.on_advance_end()
            loop.reset_restart_stage()
            # Lightning compares with the length of an epoch now, which may have been another one.
            if not math.isinf(length := trainer.num_training_batches):
                loop.epoch_loop.batch_progress.current.completed = max(0, int(length) - 1)
        elif loop.restarted_mid_epoch and -1 < trainer.max_steps <= trainer.global_step:
            # The last of all steps has ended its epoch, however many batches that has.
            loop.epoch_progress.increment_processed()
            loop.epoch_progress.increment_completed()

    def _stop_again(self, trainer: Trainer) -> None:
        """Stop where ``EarlyStopping`` has stopped the run before, unless it would not with its limits of now."""
        for callback, patience in self._patience.items():
            callback.patience = patience  # Lightning restores the former one
            reason = callback.stopping_reason
            stops = reason != EarlyStoppingReason.NOT_STOPPED
            if reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
                stops = callback.wait_count >= patience
            elif stops and (last := trainer.callback_metrics.get(callback.monitor)) is not None:
                callback.stopping_reason = EarlyStoppingReason.NOT_STOPPED
                stops, _ = callback._evaluate_stopping_criteria(last)  # the patience was not counted then
            trainer.should_stop = trainer.should_stop or stops

    def _validate(self, trainer: Trainer) -> None:
        """Run a validation that is due after the last batch."""
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        fetcher: Any = None  # read for loaders without a length only
        completed = epochs.completed
        if trainer.fit_loop.restarted_mid_epoch and loop.batch_progress.is_last_batch:
            epochs.completed -= 1  # the loop has begun the next epoch
        if self.validated < loop.batch_progress.total.ready and loop._should_check_val_fx(fetcher):
            trainer.validating = True
            loop.val_loop.run()
            trainer.training = True
        epochs.completed = completed

    def _restore_settings(self, trainer: Trainer) -> None:
        scheduled = {id(item.scheduler.optimizer): item for item in trainer.lr_scheduler_configs}
        decayed = trainer.global_step > 0 and bool(scheduled) and not any(_learning_rates(trainer))
        configured, schedules = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
        new_schedulers: dict[int, Any] = {id(item.scheduler.optimizer): item.scheduler for item in schedules}
        for optimizer, new_optimizer in zip(trainer.optimizers, configured, strict=True):
            schedule = scheduled.get(id(optimizer))
            scheduler = schedule and schedule.scheduler
            # Another schedule has its rates in its state, and cannot be asked for them under other base rates.
            kept_keys = {"params"} if isinstance(scheduler, LambdaLR | None) else {"params", "lr", "initial_lr"}
            groups = optimizer.param_groups[: len(new_optimizer.param_groups)]  # callbacks may have added others
            for group, settings in zip(groups, new_optimizer.param_groups, strict=True):
                # A rate that a callback has changed stays while the configured one is the same; schedules set theirs.
                same = group.get("constant_lr") == settings.get("constant_lr", math.nan)
                kept = kept_keys | {"lr"} if same else kept_keys
                group.update({key: value for key, value in settings.items() if key not in kept})
            if schedule is None or not isinstance(scheduler, LambdaLR):
                continue
            if schedule.interval == "step" and schedule.frequency == 1:
                scheduler.last_epoch = updates_served(trainer)  # of these settings: the fraction of the run stays
            scheduler.lr_lambdas = new_schedulers[id(new_optimizer)].lr_lambdas  # with the past updates, known only now
            scheduler.base_lrs = [group["initial_lr"] for group in groups]
            for group, factor in zip(groups, scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * factor(scheduler.last_epoch)
        if decayed and trainer.is_global_zero and (rate := max(_learning_rates(trainer))):
            warnings.warn(RISES_AGAIN.format(rate), stacklevel=2)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore the last metrics, which callbacks may monitor before they are logged again."""
        self._metrics = checkpoint.get("callback_metrics", {})
        rows = checkpoint.get("logged_rows", {})
        for logger in _resumed_loggers(trainer) if trainer.state.fn == TrainerFn.FITTING else ():
            logger.resume_at(checkpoint["global_step"], rows.get(type(logger).__name__, 0))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["callback_metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
        checkpoint["logged_rows"] = {type(logger).__name__: logger.rows for logger in _resumed_loggers(trainer)}
        batches = trainer.num_training_batches
        if not pl_module.automatic_optimization or math.isinf(batches):
            return  # a module or a loader of the user's own, whose updates and epochs the trainer cannot tell
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        if current.ready > current.processed and trainer.is_global_zero:
            warnings.warn(WITHIN_BATCH, stacklevel=2)
        loop = at_batch_end(checkpoint["loops"]["fit_loop"], int(batches), trainer.accumulate_grad_batches)
        checkpoint["loops"]["fit_loop"], checkpoint["epoch"] = loop, loop["epoch_progress"]["current"]["completed"]


def check_resumable(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Validate that a fit with this trainer can continue from a checkpoint.

    Raises:
        ConfigurationError: the checkpoint is of a run with another data module, or lacks the optimizer's state.
    """
    data_module = type(trainer.datamodule).__qualname__
    other_data_module = next((key for key in checkpoint if key.endswith("DataModule")), None)
    if other_data_module and data_module.endswith("DataModule") and data_module not in checkpoint:
        raise ConfigurationError(
            f"ckpt_path: the checkpoint is of a run with {other_data_module}, and this one has {data_module}; to begin "
            "with its weights, leave ckpt_path out and give the run's folder as `model` of the policy"
        )
    if trainer.strategy.lightning_restore_optimizer and not checkpoint.get("optimizer_states"):
        raise ConfigurationError(NO_OPTIMIZER)


def _resumed_loggers(trainer: Trainer) -> list[ResumedLogger]:
    # That of `fast_dev_run` has any attribute.
    return [item for item in trainer.loggers if isinstance(item, ResumedLogger) and isinstance(item.rows, int)]


def _learning_rates(trainer: Trainer) -> list[float]:
    return [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]


class _EndingFitLoop(_FitLoop):
    @property
    def skip(self) -> bool:
        return self.max_batches == 0 or self.trainer.limit_train_batches == 0

    def reset(self) -> None:
        progress: Any = self.epoch_loop.batch_progress
        loader: Any = self.trainer.train_dataloader
        before, length = getattr(loader, "checkpoint_batches", 0), self.trainer.num_training_batches
        dropped = 0 if progress.is_last_batch else getattr(loader, "dropped_batches", 0)
        if (before or dropped) and length == len(loader):  # other batches of a rollout are served than were counted
            counted = progress.total.ready
            for counts in (progress.total, progress.current):
                extra = counts.ready // before * (loader.batches - before) if before else dropped
                counts.ready, counts.started = counts.ready + extra, counts.started + extra
                counts.processed, counts.completed = counts.processed + extra, counts.completed + extra
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, ExactResume):
                    callback.validated += progress.total.ready - counted
            loader.checkpoint_batches = loader.dropped_batches = 0
        if dropped or getattr(loader, "extended", False):  # the epoch may be over, or have more batches now
            progress.is_last_batch = progress.current.ready >= length
        super().reset()


def at_batch_end(state: dict[str, Any], epoch_batches: int, accumulation: int) -> dict[str, Any]:
    """Return the state of a fit loop as ``on_train_batch_end`` of the last whole batch would have saved it.

    Args:
        state: state of the loop, at any hook; a new dictionary is returned.
        epoch_batches: number of batches in an epoch.
        accumulation: number of batches in an update.
    """
    batches, epochs = state["epoch_loop.batch_progress"], state["epoch_progress"]
    total, current = batches["total"]["processed"], batches["current"]["processed"]
    if not total:
        return state
    begun, ended = epochs["current"]["started"], epochs["current"]["processed"]
    epoch_over = current in (0, epoch_batches)
    # The next epoch may have begun, and none of its batches has ended; the end of one may come before its last batch.
    finished = ended - 1 if current == 0 or begun == ended else ended
    current = epoch_batches if epoch_over else current
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]
    updates = optimizer["optimizer"]["step"]["total"]["completed"]
    updated = epoch_over or current % accumulation == 0
    result = dict(state)
    result["epoch_progress"] = {name: _counts(finished + 1, finished, finished) for name in ("total", "current")}
    result["epoch_loop.batch_progress"] = {
        "total": _counts(total, total, total - 1),
        "current": _counts(current, current, current - 1),
        "is_last_batch": epoch_over,
    }
    result["epoch_loop.state_dict"] = {**state["epoch_loop.state_dict"], "_batches_that_stepped": updates - updated}
    # A validation that was interrupted begins again.
    nothing = _counts(0, 0, 0)
    result["epoch_loop.val_loop.batch_progress"] = {"total": nothing, "current": dict(nothing), "is_last_batch": False}
    if epoch_over:
        for key in ("epoch_loop.scheduler_progress", "epoch_loop.automatic_optimization.optim_progress"):
            result[key] = _without_current(result[key])
    return result


def _counts(started: int, processed: int, completed: int) -> dict[str, int]:
    return {"ready": started, "completed": completed, "started": started, "processed": processed}


def _without_current(state: Any) -> Any:
    """Return the progress with nothing done in the current epoch, as the next one begins."""
    if not isinstance(state, dict):
        return state
    return {
        key: dict.fromkeys(value, 0) if key == "current" else _without_current(value) for key, value in state.items()
    }
