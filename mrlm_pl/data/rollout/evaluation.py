"""Episodes of held-out tasks, played with the current weights: for Lightning's loops and for reports."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mrlm_pl.data.rollout.collection import warn_of_failures
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.evaluation.agents import means_by_agent
from mrlm_pl.evaluation.summary import evaluation_specs
from mrlm_pl.learner.metrics import Outcome
from mrlm_pl.learner.ranks import data_parallel_rank

logger = logging.getLogger(__name__)


class EvaluationStream:
    """Serves the episodes of a validation, test or prediction loop.

    Args:
        players: players of the episodes.
        split: split of the tasks.
        episodes: number of episodes of each environment.
        sampling: sampling settings of the turns.
        seed: seed of tasks and sampling.

    Attributes:
        few: number of tasks in the split, for each environment that has fewer tasks than episodes.
    """

    BATCH = 64

    def __init__(self, players: Players, split: str, episodes: int, sampling: Sampling, seed: int) -> None:
        self.players, self.split, self.sampling, self.trainer = players, split, sampling, players.learner.trainer
        rank, ranks = data_parallel_rank(self.trainer)
        by_environment = {
            name: evaluation_specs(environment, episodes, split, seed, name=name)
            for name, environment in players.environments.items()
        }
        self.few = {name: len(own) for name, own in by_environment.items() if len(own) < episodes}
        specs = [spec for own in by_environment.values() for spec in own]
        self.episodes, self.specs = episodes, specs[rank::ranks]
        # Every rank serves the same number of batches, or the others would wait for it forever; the last may be empty.
        self.batches = -(-len(specs[0::ranks]) // self.BATCH)

    def __len__(self) -> int:
        return self.batches

    def warn_of_few_tasks(self, option: str) -> None:
        """Warn on the first rank of environments whose split has fewer tasks than the option requests episodes."""
        if self.few and data_parallel_rank(self.trainer)[0] == 0:
            counts = ", ".join(f"{name!r} has {count}" for name, count in self.few.items())
            message = "the %s split has fewer tasks than %s, %d: %s; each is played once"
            logger.warning(message, self.split, option, self.episodes, counts)

    def __iter__(self) -> Iterator[EpisodeBatch]:
        played: list[Episode] = []
        for number in range(self.batches):
            start = number * self.BATCH
            episodes = self.players.play(self.specs[start : start + self.BATCH], self.sampling)
            played += [replace(episode, trajectories={}) for episode in episodes]
            if number == self.batches - 1:  # a sized stream is not asked for more than it has
                warn_of_failures(played, f"{self.split} episodes", Path(self.trainer.default_root_dir))
            yield EpisodeBatch(episodes, by_task=len(self.players.environments) > 1)


class EpisodeBatch:
    """Finished episodes on their way through a validation, test or prediction step.

    Args:
        episodes: finished episodes of any environments.
        by_task: whether the numbers are also logged for each environment.
    """

    def __init__(self, episodes: Sequence[Episode], by_task: bool = False) -> None:
        self.episodes, self.by_task = list(episodes), by_task

    def to(self, *args: Any, **kwargs: Any) -> EpisodeBatch:
        """Return itself: records live on no device."""
        return self

    def means(self) -> dict[str, tuple[float, float]]:
        """Return mean and number of observations by metric: ``reward``; for ``accuracy`` see :meth:`outcomes`.

        Failed episodes have neither. If all failed, both are NaN with 0 observations. Episodes of several agents also
        have ``agent/NAME/...``; see :func:`mrlm_pl.evaluation.agents.means_by_agent`.
        """
        means = dict(_means(self.episodes))
        played = [episode for episode in self.episodes if not episode.failed and episode.team_size > 1]
        turns = [(turn, row) for episode in played for row in episode.rows() for turn in row.turns]
        for name, (total, count) in means_by_agent(played, [1.0] * len(played), turns).items():
            if name.startswith("agent/") and count:
                means[name] = total / count, count
        for name in dict.fromkeys(episode.task.environment for episode in self.episodes if self.by_task):
            task_means = _means([episode for episode in self.episodes if episode.task.environment == name])
            means |= {f"{name}/{metric}": mean for metric, mean in task_means.items()}
        return means

    def counts(self) -> dict[str, int]:
        """Return the number of ``failed_episodes``, by name."""
        return {"failed_episodes": sum(episode.failed for episode in self.episodes)}

    def outcomes(self) -> Mapping[Outcome, float]:
        """Return the number of episodes that did not fail, by metric, environment and success."""
        played = [(episode.task.environment, episode.success) for episode in self.episodes if not episode.failed]
        counts = Counter(("accuracy", *outcome) for outcome in played)
        return counts + Counter((f"{outcome[0]}/accuracy", *outcome) for outcome in played if self.by_task)


def _means(episodes: Sequence[Episode]) -> Mapping[str, tuple[float, float]]:
    played = [episode for episode in episodes if not episode.failed]
    if not played:
        return {"reward": (math.nan, 0), "accuracy": (math.nan, 0)} if episodes else {}
    return {"reward": (sum(episode.reward for episode in played) / len(played), len(played))}
