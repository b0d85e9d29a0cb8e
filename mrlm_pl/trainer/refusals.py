"""Refused settings of Lightning's trainer: those that change a run in another way, or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from mrlm_pl.errors import ConfigurationError

_READ = "in a script call `algorithm.read_weights()` before `trainer.fit`"
_REFUSED: dict[type[Callback], str] = {
    BackboneFinetuning: "unfreezes a `backbone`, which the algorithm lacks; train adapters with `lora`, or freeze "
    "whole policies with `trained: false`",
    BaseFinetuning: f"freezes weights before they are read, and so none; {_READ}",
    LearningRateFinder: "sets one learning rate, and each policy has its own; give it `update_attr: false`, and set "
    "`learning_rate` of the policies",
    GradientAccumulationScheduler: "changes the number of micro-batches within an epoch, whose batches are divided "
    "already; set trainer.accumulate_grad_batches, which holds for the whole run",
    StochasticWeightAveraging: "copies the weights before they are read, and would average none; use WeightAveraging "
    f"or EMAWeightAveraging, or {_READ}",
    WeightAveraging: "copies the model, which trainer.strategy splits over the processes; use `ddp`, or leave it out",
    ModelPruning: f"looks for weights before they are read; leave it out, or {_READ}",
}


def check_numbers(trainer: Trainer) -> None:
    """Validate numbers that Lightning takes as they are.

    Raises:
        ConfigurationError: a value is out of range.
    """
    for name, least in (("gradient_clip_val", 0), ("accumulate_grad_batches", 1)):  # a negative norm reverses gradients
        value = getattr(trainer, name)
        if value is not None and not value >= least:
            raise ConfigurationError(f"trainer.{name} is {value!r}; it must be {least} or above")


def _is_plain(value: Any) -> bool:
    """Return whether PyTorch reads a value from a checkpoint without permission to run code."""
    if isinstance(value, dict | list | tuple | set):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Tensor | torch.dtype) or type(value) in (type(None), bool, int, float, complex, str, bytes)


def refuse_unsupported(trainer: Trainer, module: LightningModule) -> None:
    """Validate that the trainer's settings have their documented effect in a fit.

    Raises:
        ConfigurationError: a setting or callback has no effect, or another one than Lightning documents, or a value is
            out of range.
    """
    check_numbers(trainer)
    if overfit := trainer.overfit_batches:  # type: ignore[attr-defined]
        raise ConfigurationError(
            f"trainer.overfit_batches is {overfit}, but each epoch continues with other batches; to "
            "train on the same few, leave it out and give the data module as few rows or tasks"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None and trainer.world_size > 1:
        clocks = "is a time, and each process has its own clock; give a number of micro-batches"
        raise ConfigurationError(f"trainer.val_check_interval {clocks}")
    if trainer.precision == "16-true":
        raise ConfigurationError(
            "trainer.precision is 16-true, in which AdamW's squares of small gradients are 0 and its steps without "
            "bound; use 16-mixed or bf16-true"
        )
    outer = {
        "torch.autocast": any(map(torch.is_autocast_enabled, ("cpu", "cuda"))),  # would replace trainer.precision
        "torch.inference_mode": torch.is_inference_mode_enabled(),
        "torch.set_default_device('meta')": torch.get_default_device().type == "meta",
    }
    if modes := [name for name, entered in outer.items() if entered]:
        raise ConfigurationError(
            f"trainer.fit is called under {', '.join(modes)}; call it outside, and choose the precision by "
            "trainer.precision and the device by trainer.accelerator"
        )
    if module._compiler_ctx is not None:
        raise ConfigurationError(
            "torch.compile cannot trace a whole training step; pass the algorithm itself, and compile the layers of a "
            "policy with its `compile: true`"
        )
    keeps = [name for name, value in module.hparams.items() if not _is_plain(value)]
    if keeps:
        warnings.warn(
            f"save_hyperparameters keeps {keeps}, whose classes PyTorch reads from a checkpoint only with "
            f"`weights_only=False`, in a resume too; leave them out: save_hyperparameters(ignore={keeps})",
            stacklevel=2,
        )
    has_weights = next(module.parameters(), None) is not None
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        supported = isinstance(callback, ModelPruning | StochasticWeightAveraging | BaseFinetuning) and has_weights
        if isinstance(callback, BackboneFinetuning):
            supported = hasattr(module, "backbone")
        supported |= isinstance(callback, WeightAveraging) and not isinstance(trainer.strategy, ModelParallelStrategy)
        supported |= isinstance(callback, LearningRateFinder) and not callback._update_attr
        fault = next((fault for kind, fault in _REFUSED.items() if isinstance(callback, kind)), None)
        if fault and not supported:
            raise ConfigurationError(f"trainer.callbacks: {type(callback).__name__} {fault}")
