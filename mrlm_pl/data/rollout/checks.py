"""Checks of a rollout data module's options against the algorithm."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import starmap
from typing import Literal

from lightning.pytorch import Trainer

from mrlm_pl.data.files.base import data_option
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.data.rollout.collectors.groups import GroupPlan
from mrlm_pl.data.rollout.tasks import TaskSettings
from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.errors import ConfigurationError, counted
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.contract import RolloutLearner

logger = logging.getLogger(__name__)

_DEFAULTS = AsyncOptions()


def check_groups(learner: RolloutLearner, plan: GroupPlan, settings: Mapping[str, TaskSettings]) -> None:
    """Validate the sizes of the groups.

    Args:
        learner: the algorithm.
        plan: plan of the groups.
        settings: settings of the environments, which may override the group size.

    Raises:
        ConfigurationError: the groups are too small for the algorithm, or it compares no episodes.
    """
    name = type(learner).__name__
    for environment, size in plan.group_sizes.items():
        if size < learner.smallest_group:
            has_setting = settings[environment].group_size
            setting = f"data.task_settings.{environment}.group_size" if has_setting else "data.group_size"
            raise ConfigurationError(
                f"{setting} is {size}, but {name} compares at least {learner.smallest_group} episodes of each task; "
                f"raise {setting}"
            )
    if plan.resample_rounds and learner.smallest_group < 2:
        raise ConfigurationError(
            f"data.resample_rounds is {plan.resample_rounds}, but {name} does not compare the episodes of a task with "
            "each other and also learns from equal returns; set data.resample_rounds to 0"
        )


def check_updates(
    learner: RolloutLearner, passes: int, minibatches: int, groups: int, ranks: int, accumulation: int
) -> None:
    """Validate the updates on a rollout.

    Args:
        learner: the algorithm.
        passes: number of passes over a rollout.
        minibatches: number of updates in a pass.
        groups: number of groups in a rollout, over all ranks.
        ranks: number of ranks that divide the groups.
        accumulation: number of micro-batches in an update, on each rank.

    Raises:
        ConfigurationError: an algorithm without an importance ratio uses every token more than once, or the groups
            cannot be divided evenly.
    """
    name = type(learner).__name__
    remedy = "use an algorithm and loss with an importance ratio (GRPO, PPO; for turn trees ATGRPO)"
    if passes > 1 and not learner.uses_importance_ratio:
        raise ConfigurationError(
            f"data.passes is {passes}, but {name} has no importance ratio: the second pass has the gradient of another "
            f"policy, and nothing bounds the step; set data.passes to 1, or {remedy}"
        )
    if minibatches > 1 and not learner.uses_importance_ratio:
        logger.warning(
            "data.minibatches is %d, and %s has no importance ratio: the last mini-batch was sampled %d updates "
            "earlier and counts as on-policy; set data.minibatches to 1, or %s",
            minibatches,
            name,
            minibatches - 1,
            remedy,
        )
    updates = ranks * minibatches
    in_update, rest = divmod(groups, updates)
    if rest or (in_update % accumulation and (accumulation % in_update or not learner.divides_groups)):
        multiple = f" or a multiple of {in_update}" if learner.divides_groups and not rest else ""
        factors = (ranks, "rank"), (minibatches, "mini-batch", "mini-batches"), (accumulation, "accumulation step")
        steps = "" if rest else f"; or make trainer.accumulate_grad_batches a divisor of {in_update}{multiple}"
        raise ConfigurationError(
            f"data.groups is {groups}, which {' x '.join(starmap(counted, factors))} cannot share evenly; make it a "
            f"multiple of {updates * accumulation}{steps}"
        )


def check_validation_interval(trainer: Trainer, batches: int) -> None:
    """Validate that an epoch is long enough for a validation after a number of micro-batches.

    Args:
        trainer: trainer of the run.
        batches: micro-batches in an epoch.

    Raises:
        ConfigurationError: it is shorter.
    """
    interval, within_epochs = trainer.val_check_interval, trainer.check_val_every_n_epoch is not None
    if type(interval) is int and interval > batches and within_epochs and trainer.limit_val_batches > 0:
        raise ConfigurationError(
            f"trainer.val_check_interval is {interval} micro-batches, but an epoch has {batches} (data.iterations x "
            "data.passes x data.minibatches x trainer.accumulate_grad_batches, up to trainer.limit_train_batches); "
            "lower it, raise data.iterations, or set trainer.limit_val_batches to 0 for no validation"
        )


def check_sampling(learner: RolloutLearner, sampling: Sampling) -> None:
    """Validate the sampling of the training episodes.

    Raises:
        ConfigurationError: the algorithm cannot learn from such episodes.
    """
    if learner.uses_greedy_baseline and not any(sampling.of(name).temperature for name in learner.policies):
        raise ConfigurationError(
            f"data.sampling.temperature is 0, so every episode is the greedy one that {type(learner).__name__} "
            "compares with, and all advantages are 0; set a temperature above 0, such as 1.0"
        )
    learner.turn_bonus(sampling)


def check_lag(
    learner: RolloutLearner, mode: Literal["sync", "async"], max_lag: int, options: AsyncOptions, sampling: Sampling
) -> None:
    """Warn of options of playing while the learner updates that have no effect, and of uncorrected stale samples."""
    name = type(learner).__name__
    correction = getattr(getattr(learner, "old_policy", None), "correction", None)
    if mode == "sync" and (max_lag > 1 or options != _DEFAULTS):
        logger.warning(
            "data.max_lag and data.async_options have no effect in data.mode sync, where what samples is what learns; "
            "`--data.mode async` plays episodes while the learner updates"
        )
    if mode == "async" and max_lag and not learner.weighs_sampler(sampling):
        logger.warning(
            "data.mode is async, and %s treats samples that are up to %d iterations stale as on-policy; %s",
            name,
            max_lag,
            "set `model.correction: {kind: truncated}` to reweight them"
            if correction is not None
            else "it has no correction to reweight them: `data.max_lag: 1` keeps them nearest, 0 is synchronous, and "
            "an algorithm with a ratio (GRPO, PPO) needs no correction",
        )


def check_learns(algorithm: Algorithm) -> None:
    """Validate that the algorithm learns from rollouts.

    Raises:
        ConfigurationError: the algorithm does not learn from rollouts; the message names its data module.
    """
    if type(algorithm).prepare is RolloutLearner.prepare:
        raise ConfigurationError(
            f"{type(algorithm).__name__} does not learn from rollouts; give it {data_option(algorithm)}"
        )


def check_logprobs(learner: RolloutLearner, engine: Engine) -> None:
    """Validate that the engine returns the tokens that it sampled, with their log-probabilities.

    Args:
        learner: algorithm, attached to its trainer.
        engine: engine of the run.

    Raises:
        ConfigurationError: the engine of a trained policy does not return them.
    """
    for name in learner.policies:
        if learner.policy(name).trained and not engine.reports_logprobs(name):
            raise ConfigurationError(
                f"policy {name!r} is trained, and data.engine returns no token ids and log-probabilities of its "
                "samples; use `dialect: vllm` or `dialect: sglang`, leave data.engine out to generate in this process, "
                "or set `trained: false` for the policy"
            )
