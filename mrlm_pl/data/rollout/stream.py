"""What Lightning's loops read of the rollout data module."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from mrlm_pl.data.rollout.checks import check_command
from mrlm_pl.data.rollout.minibatches import Cut
from mrlm_pl.data.rollout.tasks.environments import RunTasks
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.agents import means_by_agent
from mrlm_pl.evaluation.report import evaluation_specs, judged_successes
from mrlm_pl.learner.batch import Batch
from mrlm_pl.rollout.play import EpisodeSpec

logger = logging.getLogger(__name__)


class Served(Protocol):
    """What the streams read of a data module; see :class:`~mrlm_pl.data.rollout.module.RolloutDataModule`."""

    iterations: int
    environments: dict[str, Environment]
    tasks: RunTasks
    validation_episodes: int
    validation_sampling: Sampling
    seed: int

    @property
    def cut(self) -> Cut:
        """How a rollout is cut into batches of Lightning."""

    def next_batch(self) -> Batch:
        """Return the next batch; collects a rollout when the last one is used up."""

    def play(self, specs: Sequence[EpisodeSpec], sampling: Sampling) -> list[Episode]:
        """Return episodes that the current weights played."""

    def share(self) -> tuple[int, int]:
        """Return this process's number among those that the data is divided among, and how many these are."""


class TrainingStream:
    """Sized, because Lightning prefetches from an unsized loader and would collect with weights one step old."""

    def __init__(self, data: Served) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.iterations * self.data.cut.pieces

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            yield self.data.next_batch()


class EvaluationStream:
    BATCH = 64

    def __init__(self, data: Served, split: str) -> None:
        self.data, self.split = data, split
        rank, ranks = data.share()
        specs = [
            spec
            for name, environment in data.environments.items()
            for spec in evaluation_specs(environment, data.validation_episodes, split, data.seed, name=name)
        ]
        self.specs = specs[rank::ranks]
        # Every rank serves the same number of batches, or the others would wait for it for ever; the last may be empty.
        self.batches = -(-len(specs[0::ranks]) // self.BATCH)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[EpisodeBatch]:
        failed = []
        for number in range(self.batches):
            start = number * self.BATCH
            episodes = self.data.play(self.specs[start : start + self.BATCH], self.data.validation_sampling)
            failed += [episode for episode in episodes if episode.failed]
            if failed and number == self.batches - 1:  # a sized stream is not asked for more than it has
                logger.warning(
                    "%d of %d %s episodes failed, and the numbers are of the others; the first: %s; try `%s`",
                    len(failed),
                    len(self.specs),
                    self.split,
                    failed[0].error,
                    check_command(self.data.environments[failed[0].task.environment]),
                )
            yield EpisodeBatch(episodes, by_task=self.data.tasks.several)


class EpisodeBatch:
    """Finished episodes on their way through a validation, test or prediction step.

    Args:
        episodes: of any environments.
        by_task: whether the numbers are also told of each environment.
    """

    def __init__(self, episodes: Sequence[Episode], by_task: bool = False) -> None:
        self.episodes, self.by_task = list(episodes), by_task

    def to(self, *args: Any, **kwargs: Any) -> EpisodeBatch:
        """Itself: records live on no device."""
        return self

    def means(self) -> dict[str, tuple[float, float]]:
        """Return mean and number of observations by metric: ``reward``, and ``accuracy`` where success is known.

        Failed episodes have neither. Where all failed, both are NaN of 0 observations: nothing is known. Episodes of
        several agents also have ``agent/NAME/...``; see :func:`mrlm_pl.evaluation.agents.means_by_agent`.
        """
        means = dict(_means(self.episodes))
        played = [episode for episode in self.episodes if not episode.failed and episode.team_size > 1]
        turns = [(turn, row) for episode in played for row in episode.rows() for turn in row.turns]
        for name, (total, count) in means_by_agent(played, [1.0] * len(played), turns).items():
            if name.startswith("agent/"):
                means[name] = total / count, count
        for name in dict.fromkeys(episode.task.environment for episode in self.episodes if self.by_task):
            own = _means([episode for episode in self.episodes if episode.task.environment == name])
            means |= {f"{name}/{metric}": mean for metric, mean in own.items()}
        return means

    def counts(self) -> dict[str, int]:
        """``failed_episodes``, by name."""
        return {"failed_episodes": sum(episode.failed for episode in self.episodes)}


def _means(episodes: Sequence[Episode]) -> Mapping[str, tuple[float, float]]:
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        return {"reward": (math.nan, 0), "accuracy": (math.nan, 0)} if episodes else {}
    means = {"reward": (sum(episode.reward for episode in played) / len(played), len(played))}
    judged = judged_successes(played)
    if judged:
        means["accuracy"] = (sum(judged) / len(judged), len(judged))
    return means
