"""The environments of a run, what differs between them, and which of their tasks comes next."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.data.curriculum import SuccessRateCurriculum
from mrlm_pl.data.named_environments import named_environments, training_sources
from mrlm_pl.data.planned_stream import PlannedStream
from mrlm_pl.data.task_settings import TaskSettings, check_names
from mrlm_pl.data.task_stream import TaskStream
from mrlm_pl.environment import Environment

logger = logging.getLogger(__name__)


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
        self.settings, self.curriculum = dict(settings or {}), curriculum
        check_names("data.task_settings", list(self.settings), list(self.environments))
        sources = training_sources(self.environments)
        self.stream: TaskStream | PlannedStream = (PlannedStream if curriculum else TaskStream)(sources, weights, seed)
        self.base = dict(zip(self.environments, self.stream.shares, strict=True))
        self.rates = dict.fromkeys(self.environments, curriculum.start if curriculum else 0.0)
        self._silent: set[str] = set()

    @property
    def several(self) -> bool:
        """Whether there is more than one environment."""
        return len(self.environments) > 1

    def group_sizes(self, size: int) -> dict[str, int]:
        """Episodes of each task by environment, where ``size`` is for those without a number of their own."""
        return {name: self._own(name).group_size or size for name in self.environments}

    def turn_limits(self, limit: int) -> dict[str, int]:
        """Decisions after which an episode is cut short by environment; ``limit`` likewise."""
        return {name: self._own(name).max_turns or limit for name in self.environments}

    @property
    def reward_scales(self) -> dict[str, float]:
        """Factor of the rewards where they are learnt from, by environment."""
        return {name: self._own(name).reward_scale for name in self.environments}

    def _own(self, name: str) -> TaskSettings:
        return self.settings.get(name, TaskSettings())

    def plan_until(self, iteration: int, last: int, groups: int) -> None:
        """Decide the environments of the groups of iterations up to ``last``, those that are not decided yet.

        Args:
            iteration: that is collected now; what was planned for those before is dropped.
            last: the furthest whose groups may begin now.
            groups: in an iteration.
        """
        if not isinstance(self.stream, PlannedStream):
            self.stream.picked(iteration * groups)  # a resumed run decides those before it first
            self.stream.forget(iteration * groups)
            return
        assert self.curriculum is not None
        while self.stream.planned < iteration * groups:
            self.stream.plan(groups, self.base)  # a run that went on from a checkpoint without a curriculum
        self.stream.forget(iteration * groups)
        while self.stream.planned < (last + 1) * groups:
            self.stream.plan(groups, self.curriculum.shares(self.base, self.rates))

    def learn(self, found: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Let the curriculum know how an iteration went, and return the numbers to log.

        Args:
            found: (successes, episodes) over all ranks, by environment that was played; no episodes where it does not
                judge.
        """
        if self.curriculum is None:
            return {}
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
        """What decides the tasks to come beside the position, as plain values; None where nothing does."""
        return {"rates": dict(self.rates), **self.stream.state()} if isinstance(self.stream, PlannedStream) else None

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Take over what :meth:`state` gave.

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
