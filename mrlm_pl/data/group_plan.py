"""Which episodes an iteration plays."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mrlm_pl.data.task_stream import TaskStream
from mrlm_pl.play import EpisodeSpec
from mrlm_pl.seeding import derive_seed


@dataclass(frozen=True)
class GroupPlan:
    """The episodes of every group of every iteration, as a function of the position alone.

    Args:
        tasks: where tasks are drawn.
        groups: in an iteration, over all ranks.
        group_size: episodes of each.
        attempts: tasks that each group has, used or not: the first and those that may replace it.
        seed: of all sampling.
    """

    tasks: TaskStream
    groups: int
    group_size: int
    attempts: int
    seed: int

    def specs(self, iteration: int, group: int, attempt: int = 0) -> list[EpisodeSpec]:
        """The episodes of a group at an attempt."""
        task = self.tasks.attempt(iteration * self.groups + group, attempt, self.attempts)
        name = f"{iteration}-{group}" + (f".{attempt}" if attempt else "")
        key = (iteration, group, attempt) if attempt else (iteration, group)
        return [
            EpisodeSpec(
                id=f"{name}-{member}",
                task=task,
                group=name,
                seed=derive_seed("episode", self.seed, *key, member),
                iteration=iteration,
            )
            for member in range(self.group_size)
        ]

    def root(self, iteration: int, group: int, attempt: int = 0) -> EpisodeSpec:
        """The root of a group's turn tree."""
        first = self.specs(iteration, group, attempt)[0]
        return replace(first, id=first.group)
