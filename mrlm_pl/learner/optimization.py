"""The optimizer and the schedule of its learning rates."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from mrlm_pl.errors import ConfigurationError, NonFiniteError, counted
from mrlm_pl.learner.batch import not_none
from mrlm_pl.policy import Policy
from mrlm_pl.policy.sharding import total_norm
from mrlm_pl.settings import FractionBelowOne, NonNegativeInt, Settings

logger = logging.getLogger(__name__)

LearningRateSchedule = Literal["constant", "constant_with_warmup", "linear", "cosine"]


@dataclass(frozen=True)
class Optimization(Settings):
    """Settings of AdamW that hold for all policies; learning rate and weight decay are each policy's own.

    Args:
        schedule: schedule of the learning rates over the run.
        warmup_steps: optimizer steps over which the learning rates rise from 0.
        betas: decay rates of AdamW's moments.

    Raises:
        ConfigurationError: an unknown schedule or a value out of range.
    """

    schedule: LearningRateSchedule = "constant"
    warmup_steps: NonNegativeInt = 0
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2:
            raise ConfigurationError(f"optimization.betas is {self.betas}; give two numbers of at least 0 and below 1")

    def configured(self, groups: Sequence[dict[str, Any]], scaled: bool, steps: Callable[[], int]) -> Any:
        """Return the optimizer, and its schedule if there is one, in the form that Lightning takes.

        Args:
            groups: parameter groups of the optimizer.
            scaled: whether gradients are scaled, as under fp16: they are clipped after their scale is gone, which only
                an optimizer that is not fused allows.
            steps: function that returns the number of optimizer steps of the run; called only with a schedule.
        """
        # A resume compares the configured rate with that of the checkpoint.
        rates = [{**group, "constant_lr": group["lr"] if self.schedule == "constant" else None} for group in groups]
        # PyTorch's own choice makes a dozen passes over the weights and allocates temporaries of their size.
        optimizer = torch.optim.AdamW(rates, betas=self.betas, fused=None if scaled else True)
        if self.schedule == "constant":
            return optimizer
        from transformers import get_scheduler

        updates = steps()
        if updates <= self.warmup_steps:
            rank_zero_only(logger.warning)(
                "optimization.warmup_steps is %d and the run has %s: the learning rate never reaches its full "
                "value; lower it, or train longer",
                self.warmup_steps,
                counted(updates, "update"),
            )
        scheduler = get_scheduler(self.schedule, optimizer, self.warmup_steps, updates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def weight_group(name: str, owner: str, model: Policy) -> dict[str, Any]:
    """Return the optimizer's group of a model's trained weights.

    Args:
        name: name of the group.
        owner: policy or critic; an update without its trajectories skips the group.
        model: model whose weights have been read.

    Raises:
        ConfigurationError: all weights are frozen.
    """
    weights = [weight for weight in model.model.parameters() if weight.requires_grad]
    if not weights:
        raise ConfigurationError(
            f"policy {name!r} is trained, but a callback or `freeze` has frozen all its weights; leave some, or set "
            "its `trained: false`"
        )
    settings = {"lr": model.learning_rate, "weight_decay": model.weight_decay}
    return {"params": weights, **settings, "name": name, "policy": owner}


def value_group(owner: str, critic: Policy, value_learning_rate: float | None) -> dict[str, Any]:
    """Return the optimizer's group of a value head, named ``OWNER/value``.

    Args:
        owner: policy or critic; an update without its trajectories skips the group.
        critic: critic whose weights have been read.
        value_learning_rate: learning rate of the head; None is the critic's own.
    """
    rate = critic.learning_rate if value_learning_rate is None else value_learning_rate
    head = list(not_none(critic.value_head).parameters())
    return {"params": head, "lr": rate, "weight_decay": 0.0, "name": f"{owner}/value", "policy": owner}


def owned_groups(
    groups: Sequence[dict[str, Any]], own_groups: Callable[[], Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each group of an optimizer with its policy and the suffix of its metrics.

    A group of a user's own optimizer, or one that a callback has added, names no policy: it has that of its weights;
    the empty name if they belong to none.

    Args:
        groups: parameter groups of the optimizer.
        own_groups: function that returns the algorithm's groups, for those that name no policy.

    Raises:
        ConfigurationError: a group without a name has weights of several policies.
    """
    for index, group in enumerate(groups):
        if "policy" in group:
            yield group, group["policy"], group["name"].removeprefix(group["policy"]).replace("/", "_")
            continue
        weights = set(group["params"])
        owners = sorted({own["policy"] for own in own_groups() if not weights.isdisjoint(own["params"])})
        if len(owners) > 1:
            raise ConfigurationError(
                f"configure_optimizers: parameter group {index} has weights of the policies {owners}, and an update "
                "may have data for some of them only; pass the optimizer `self.parameter_groups()`"
            )
        yield group, "".join(owners), f"_{group.get('name', index)}" if len(groups) > 1 else ""


def gradient_norm(weights: Sequence[Tensor], name: str, step: int, scaled: bool) -> float:
    """Return the norm of the gradient of weights.

    Args:
        weights: those of a parameter group of the optimizer.
        name: name of the norm's metric, for the message.
        step: index of the update, for the message.
        scaled: whether a gradient that overflows is expected, as under fp16: its scaler leaves out the step and lowers
            its factor.

    Raises:
        NonFiniteError: the norm is not finite, and that is not expected.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    norm = float(total_norm(gradients)) if gradients else 0.0
    if not math.isfinite(norm) and not scaled:
        raise NonFiniteError(
            f"{name} is {norm} at step {step}; lower the learning rate or clip the gradient "
            "(`--trainer.gradient_clip_val 1.0`)"
        )
    return norm
