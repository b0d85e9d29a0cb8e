"""The environments of a run: their names, settings, tasks and reward scales."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlm_pl.data.rollout.tasks.stream import PlannedStream, SuccessRateCurriculum, TaskStream
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError, meant
from mrlm_pl.settings import as_settings, at_least, positive

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSettings:
    """Settings of one environment among several; None is the value for all of them.

    Args:
        group_size: episodes of each task (decisions of each agent in a state of a turn tree); None is
            ``data.group_size``.
        max_turns: decisions after which an episode is truncated, in training and validation; None is
            ``data.max_turns``.
        reward_scale: factor of the rewards in training; see :meth:`RunTasks.worth`.

    Raises:
        ConfigurationError: a value out of range.
    """

    group_size: int | None = None
    max_turns: int | None = None
    reward_scale: float = 1.0

    def __post_init__(self) -> None:
        owner = "data.task_settings: "
        at_least(1, owner, group_size=self.group_size, max_turns=self.max_turns)
        positive(owner, reward_scale=self.reward_scale)


class RunTasks:
    """The environments of a run by name, with their settings and the stream of their tasks.

    Args:
        environments: at least one.
        names: see :class:`RolloutDataModule`, like all others.
        settings: ``task_settings``.
        weights, curriculum, seed: what decides which task comes next.

    Raises:
        ConfigurationError: names or weights do not fit the environments.
    """

    def __init__(
        self,
        environments: Sequence[Environment],
        names: Sequence[str] | None,
        settings: Mapping[str, TaskSettings] | None,
        weights: Sequence[float] | None,
        curriculum: SuccessRateCurriculum | None,
        seed: int,
    ) -> None:
        self.environments = named_environments(environments, names)
        given, self.curriculum = dict(settings or {}), curriculum
        self.settings = {
            name: as_settings(TaskSettings, own, f"data.task_settings.{name}") for name, own in given.items()
        }
        for name in self.settings.keys() - self.environments.keys():
            hint = meant(name, self.environments, f"the environments are {list(self.environments)}")
            raise ConfigurationError(
                f"data.task_settings names the environment {name!r}, which this run does not have; {hint}"
            )
        sources = {name: environment.tasks("train") for name, environment in self.environments.items()}
        self.stream: TaskStream | PlannedStream = (PlannedStream if curriculum else TaskStream)(sources, weights, seed)
        self.base = dict(zip(self.environments, self.stream.shares, strict=True))
        self.rates = dict.fromkeys(self.environments, curriculum.start if curriculum else 0.0)
        self._silent: set[str] = set()

    def group_sizes(self, size: int) -> dict[str, int]:
        """Return the episodes of each task by environment; ``size`` where it has no setting."""
        return {name: self._own(name).group_size or size for name in self.environments}

    def turn_limits(self, limit: int) -> dict[str, int]:
        """Return the limit of decisions in an episode by environment; ``limit`` where it has no setting."""
        return {name: self._own(name).max_turns or limit for name in self.environments}

    def worth(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with every reward times the scale of its environment, for training.

        Environments reward in different units. The scale applies to advantages, values and comparisons alone: records,
        files, metrics, evaluations and curricula keep the rewards of the environment, so that runs can be compared.
        Terms that the algorithm adds (``overlong_buffer``, the KL penalty) are not scaled. An advantage that is divided
        by the standard deviation of its group does not depend on the scale.
        """
        return [scaled(episode, self._own(episode.task.environment).reward_scale) for episode in episodes]

    def _own(self, name: str) -> TaskSettings:
        return self.settings.get(name, TaskSettings())

    def plan_until(self, iteration: int, last: int, groups: int) -> None:
        """Decide the environments of the groups up to an iteration, where they are not decided yet.

        Args:
            iteration: the current one; the plan of earlier ones is dropped.
            last: the furthest whose groups may begin now.
            groups: in an iteration.
        """
        if not isinstance(self.stream, PlannedStream):
            self.stream.picked(iteration * groups)  # a resumed run decides those before it first
            self.stream.forget(iteration * groups)
            return
        assert self.curriculum is not None
        while self.stream.planned < iteration * groups:
            self.stream.plan(groups, self.base)  # a run resumed from a checkpoint without a curriculum
        self.stream.forget(iteration * groups)
        while self.stream.planned < (last + 1) * groups:
            self.stream.plan(groups, self.curriculum.shares(self.base, self.rates))

    def learn(self, found: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Update the curriculum after an iteration, and return the numbers to log.

        Args:
            found: (successes, episodes) over all ranks, by environment that was played; 0 episodes where it does not
                judge.
        """
        assert self.curriculum is not None
        for name in sorted({name for name, (_, episodes) in found.items() if not episodes} - self._silent):
            self._silent.add(name)
            logger.warning(
                "environment %r does not say whether its tasks are solved, so data.curriculum leaves its success rate "
                "at %g",
                name,
                self.rates[name],
            )
        self.rates = self.curriculum.updated(self.rates, found)
        shares = self.curriculum.shares(self.base, self.rates)
        return {f"rollout/{name}/success_rate": rate for name, rate in self.rates.items()} | {
            f"rollout/{name}/weight": share for name, share in shares.items()
        }

    def state(self) -> dict[str, Any] | None:
        """Return the state of the curriculum and its plan, as plain values; None without a curriculum."""
        return {"rates": dict(self.rates), **self.stream.state()} if isinstance(self.stream, PlannedStream) else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore what :meth:`state` returned.

        Raises:
            ConfigurationError: it is of other environments.
        """
        if isinstance(self.stream, PlannedStream) and state is not None:
            self.stream.load(state)
            self.rates = dict(state["rates"])
        elif state is not None:
            logger.warning("the checkpoint has a curriculum and this run has none: tasks are drawn by data.weights")
        elif isinstance(self.stream, PlannedStream):
            logger.warning("the checkpoint has no curriculum and this run has one: it begins with no success known")


def named_environments(environments: Sequence[Environment], names: Sequence[str] | None) -> dict[str, Environment]:
    """Return the environments by name.

    Args:
        environments: at least one.
        names: one for each; None is their own.

    Raises:
        ConfigurationError: the names are not as many as the environments, two share one, or one cannot be part of a
            metric's name.
    """
    for item in environments:
        if not isinstance(item, Environment):
            remedy = f"call it: {item.__name__}()" if isinstance(item, type) else "give an instance of its class"
            raise ConfigurationError(f"data.environment: {item!r:.80} is no environment; {remedy}")
    own = [item.name for item in environments]
    chosen = own if names is None else list(names)
    if len(chosen) != len(own):
        raise ConfigurationError(
            f"data.names are {chosen} for {len(own)} environments ({', '.join(own)}); give one for each, in their order"
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigurationError(f"environments {chosen} share a name; give each one its own with data.names")
    for name in chosen:
        if not name or "/" in name:
            raise ConfigurationError(f"data.names: {name!r} cannot be a name; use letters, digits, '_' and '-'")
    return dict(zip(chosen, environments, strict=True))


def scaled(episode: Episode, scale: float) -> Episode:
    """Return the episode with every reward times ``scale``."""
    if scale == 1.0:
        return episode

    def changed(turn: Turn) -> Turn:
        components = {name: value * scale for name, value in turn.components.items()}
        return dataclasses.replace(turn, reward=turn.reward * scale, components=components)

    return dataclasses.replace(
        episode.with_turns(changed),
        step_rewards=tuple({agent: reward * scale for agent, reward in step.items()} for step in episode.step_rewards),
    )
