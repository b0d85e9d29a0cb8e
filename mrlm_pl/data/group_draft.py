"""The episodes of one group while they are collected: what is to be played next, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mrlm_pl.data.group_plan import GroupPlan
from mrlm_pl.episode import Episode
from mrlm_pl.play import EpisodeSpec


@dataclass
class GroupDraft:
    """One group of an iteration, played again with another task as long as its episodes teach nothing.

    Args:
        plan: which episodes there are.
        iteration: of the group.
        group: its number in the iteration.
        silent: whether episodes that are compared teach nothing.
        episodes: those that are kept.
        replaced: others that were played.
        due: whether episodes are to be played.
    """

    plan: GroupPlan
    iteration: int
    group: int
    silent: Callable[[Sequence[Episode]], bool]
    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    due: bool = True
    attempt: int = 0

    def specs(self) -> list[EpisodeSpec]:
        """The separate episodes that are due."""
        return self.plan.specs(self.iteration, self.group, self.attempt)

    def root(self) -> EpisodeSpec:
        """The root of the turn tree that is due."""
        return self.plan.root(self.iteration, self.group, self.attempt)

    def take(self, episodes: Sequence[Episode]) -> None:
        """Note what was played of what was due."""
        self.replaced += self.episodes
        self.episodes = list(episodes)
        self.attempt += 1
        self.due = self.attempt < self.plan.attempts and self.silent(self.episodes)
