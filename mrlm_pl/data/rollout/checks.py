"""Whether an algorithm can learn from the collections that a rollout data module is set to make, and has made."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from mrlm_pl.data.option import data_option
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.data.rollout.tasks.environments import RunTasks
from mrlm_pl.engines import Engine, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError, RolloutError
from mrlm_pl.learner.algorithm import Algorithm

logger = logging.getLogger(__name__)


class RolloutSettings(Protocol):
    """What is checked of a data module; see :class:`~mrlm_pl.data.rollout.module.RolloutDataModule`."""

    groups: int
    group_sizes: dict[str, int]
    tasks: RunTasks
    resample_rounds: int
    passes: int
    minibatches: int
    sampling: Sampling
    players: Players
    async_options: AsyncOptions
    mode: Literal["sync", "async"]
    max_lag: int

    @property
    def overlaps(self) -> bool:
        """Whether episodes are played while the weights change."""


def check_fit(data: RolloutSettings, algorithm: Algorithm, ranks: int, accumulation: int) -> None:
    """Validate that the algorithm can learn from the data module's rollouts.

    Args:
        data: made, and attached to a trainer.
        algorithm: of the trainer.
        ranks: how many share the groups of a collection out.
        accumulation: pieces of an update on each rank.

    Raises:
        ConfigurationError: a setting of the data module is none for this algorithm, or for so many ranks.
    """
    name = type(algorithm).__name__
    for environment, size in data.group_sizes.items():
        if size < algorithm.smallest_group:
            own = data.tasks.settings.get(environment)
            setting = f"data.task_settings.{environment}.group_size" if own and own.group_size else "data.group_size"
            raise ConfigurationError(
                f"{setting} is {size}, but {name} compares at least {algorithm.smallest_group} episodes of each task; "
                f"raise {setting}"
            )
    if data.resample_rounds and algorithm.smallest_group < 2:
        raise ConfigurationError(
            f"data.resample_rounds is {data.resample_rounds}, but {name} does not compare the episodes of a task with "
            "each other and also learns from equal returns; set data.resample_rounds to 0"
        )
    if not algorithm.uses_importance_ratio:
        _check_updates(name, data.passes, data.minibatches)
    if algorithm.uses_greedy_baseline and not data.sampling.temperature:
        raise ConfigurationError(
            f"data.sampling.temperature is 0, so every episode is the greedy one that {name} compares with, and all "
            "advantages are 0; set a temperature above 0, such as 1.0"
        )
    algorithm.turn_bonus(data.sampling)
    check_logprobs(data.players.given, algorithm, data.sampling, data.overlaps)
    if data.players.given is not None:  # a pool knows its workers' engine only then
        data.players.check = lambda engine: check_logprobs(engine, algorithm, data.sampling, data.overlaps)
    correction = getattr(algorithm, "correction", None)
    if data.async_options.over_age == "reweight" and (correction is None or correction.kind == "none"):
        raise ConfigurationError(
            f"data.async_options.over_age is reweight, but {name} weighs nothing; give it a "
            "correction (`model.correction: {kind: truncated}`), or choose drop"
        )
    if data.mode == "sync" and (data.max_lag > 1 or data.async_options != AsyncOptions()):
        logger.warning(
            "data.max_lag and data.async_options have no effect in data.mode sync, where what samples is what learns; "
            "`--data.mode async` plays episodes while the learner updates"
        )
    if data.overlaps and not algorithm.weighs_sampler(data.sampling):
        logger.warning(
            "data.mode is async, and %s takes what weights up to %d versions older have sampled for its own; %s",
            name,
            data.max_lag,
            "`model.correction: {kind: truncated}` weighs it"
            if correction is not None
            else "it has no correction to weigh them with: `data.max_lag: 1` keeps them nearest, 0 is synchronous, and "
            "an algorithm with a ratio (GRPO, PPO) needs no correction",
        )
    pieces = ranks * data.minibatches * accumulation
    if data.groups % pieces:
        raise ConfigurationError(
            f"data.groups is {data.groups}, which {ranks} ranks x {data.minibatches} minibatches x "
            f"{accumulation} accumulation steps cannot share evenly; make it a multiple of {pieces}"
        )


def _check_updates(name: str, passes: int, minibatches: int) -> None:
    """Validate how often an algorithm without an importance ratio uses a rollout.

    Raises:
        ConfigurationError: it uses every token more than once.
    """
    remedy = "use an algorithm with an importance ratio (GRPO, PPO; for turn trees ATGRPO)"
    if passes > 1:
        raise ConfigurationError(
            f"data.passes is {passes}, but {name} has no importance ratio: the second pass has the gradient of another "
            f"policy, and nothing bounds the step; set data.passes to 1, or {remedy}"
        )
    if minibatches > 1:
        logger.warning(
            "data.minibatches is %d, and %s has no importance ratio: the last mini-batch was sampled %d updates "
            "earlier and counts as on-policy; set data.minibatches to 1, or %s",
            minibatches,
            name,
            minibatches - 1,
            remedy,
        )


def check_learns(algorithm: Algorithm) -> None:
    """Refuse an algorithm that does not learn from episodes.

    Raises:
        ConfigurationError: it does not prepare them; the message has its data module.
    """
    if type(algorithm).prepare is Algorithm.prepare:
        raise ConfigurationError(
            f"{type(algorithm).__name__} does not learn from rollouts; give it {data_option(algorithm)}"
        )


def check_command(environment: Environment) -> str:
    """The command that checks an environment of this class."""
    cls = type(environment)
    required = [
        f" --environment.{name} ..."
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return f"mrlm check-env {cls.__module__}.{cls.__qualname__}{''.join(required)}"


def check_played(episodes: Sequence[Episode], iteration: int, environments: Mapping[str, Environment]) -> None:
    """Tell of failed episodes.

    Raises:
        RolloutError: all have failed; on one rank this ends the whole run, since the launcher stops the others.
    """
    failed = [episode for episode in episodes if episode.failed]
    if len(failed) == len(episodes):
        raise RolloutError(
            f"all {len(episodes)} episodes of iteration {iteration} failed; the first: {failed[0].error}; "
            f"try `{check_command(environments[failed[0].task.environment])}`"
        )
    if failed:
        logger.warning("%d of %d episodes failed; the first: %s", len(failed), len(episodes), failed[0].error)


def check_kept(kept: Sequence[Episode], iteration: int) -> None:
    """Tell of a collection that leaves nothing to learn from."""
    if not kept:
        logger.warning(
            "no group of this process is left to learn from in iteration %d; where no other process has one, its "
            "updates change nothing; see data.failed_members and data.retries",
            iteration,
        )


def check_logprobs(engine: Engine | None, algorithm: Algorithm, sampling: Sampling, overlaps: bool = False) -> None:
    """Nothing, where samples have log-probabilities or training does not use them.

    Args:
        engine: of the run; None is the in-process engine.
        algorithm: attached to its trainer.
        sampling: of the training episodes.
        overlaps: whether episodes are played while the weights change, so that the learner's are newer ones.

    Raises:
        ConfigurationError: the algorithm would learn from log-probabilities that nobody computed.
    """
    if engine is None:
        return
    for name in algorithm.policies:
        if not algorithm.policy(name).trained or engine.reports_logprobs(name):
            continue
        if overlaps:
            raise ConfigurationError(
                f"policy {name!r} is trained, data.mode is async, and data.engine gives no log-probabilities of what "
                "it samples; the learner's are of newer weights: set data.mode to sync, or use another dialect"
            )
        if algorithm.reads_sampler_logprobs(sampling):
            raise ConfigurationError(
                f"policy {name!r} is trained, and data.engine gives no log-probabilities of what it samples; set "
                f"model.recompute_old_logp to true, so that {type(algorithm).__name__} takes them from the learner "
                "(without a correction, which weighs the sampler's), use another dialect, or `trained: false`"
            )
