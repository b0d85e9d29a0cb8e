"""What Lightning's loops read of the rollout data module."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mrlm_pl.batch import Batch
from mrlm_pl.data.episode_batch import EpisodeBatch
from mrlm_pl.data.rollout_checks import check_command
from mrlm_pl.evaluation import evaluation_specs

if TYPE_CHECKING:
    from mrlm_pl.data.rollout_module import RolloutDataModule


logger = logging.getLogger(__name__)


class TrainingStream:
    """Sized, because Lightning prefetches from an unsized loader and would collect with weights one step old."""

    def __init__(self, data: RolloutDataModule) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.iterations * self.data.cut.pieces

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            yield self.data.next_batch()


class EvaluationStream:
    BATCH = 64

    def __init__(self, data: RolloutDataModule, split: str) -> None:
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
