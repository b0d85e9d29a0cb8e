"""The episodes of one group while they are collected: what is to be played next, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mrlm_pl.data.group_plan import GroupPlan
from mrlm_pl.episode import Episode
from mrlm_pl.play import EpisodeSpec


@dataclass
class GroupDraft:
    """One group of an iteration, played again with another task as long as its episodes teach nothing.

    Whoever collects plays what is due (:meth:`specs`, or :meth:`root` of a turn tree), hands it to :meth:`take` and
    goes on while :attr:`due`; then :meth:`kept` and :meth:`others` are what was played.

    Args:
        plan: which episodes there are, with the rules for those that fail.
        iteration: of the group.
        group: its number in the iteration.
        episodes: those of the current task.
        replaced: others that were played.
        due: whether episodes are to be played.
        attempt: how many tasks were played to the end.
        resampled: how many failed episodes were played again.
    """

    plan: GroupPlan
    iteration: int
    group: int
    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    due: bool = True
    attempt: int = 0
    resampled: int = 0
    _round: int = 0
    _failed: list[int] = field(default_factory=list)

    def specs(self) -> list[EpisodeSpec]:
        """The separate episodes that are due."""
        specs = self.plan.specs(self.iteration, self.group, self.attempt)
        if not self._round:
            return specs
        return [self.plan.another(specs[place], self._round) for place in self._failed]

    def root(self) -> EpisodeSpec:
        """The root of the turn tree that is due."""
        root = self.plan.root(self.iteration, self.group, self.attempt)
        return self.plan.another(root, self._round) if self._round else root

    def take(self, episodes: Sequence[Episode]) -> None:
        """Note what was played of what was due."""
        rules = self.plan.rules
        if self._round and not rules.trees:
            for place, episode in zip(self._failed, episodes, strict=True):
                self.replaced.append(self.episodes[place])
                self.episodes[place] = episode
        else:
            self.replaced += self.episodes
            self.episodes = list(episodes)
        self._failed = [place for place, episode in enumerate(self.episodes) if episode.failed]
        if self._failed and rules.failed_members == "resample" and self._round < rules.member_rounds:
            self._round += 1
            self.resampled += len(self._failed)
            return
        self._round = 0
        self.attempt += 1
        self.due = self.attempt < self.plan.attempts and (self.left_out or rules.silent(self.episodes))

    @property
    def left_out(self) -> bool:
        """Whether too few of the episodes can be used."""
        return self.plan.rules.unusable(self.episodes)

    def kept(self) -> list[Episode]:
        """The episodes that are learnt from."""
        return [] if self.left_out else self.episodes

    def others(self) -> list[Episode]:
        """All others that were played."""
        return [*self.replaced, *self.episodes] if self.left_out else self.replaced

    def counts(self) -> dict[str, float]:
        """What became of the group, as numbers that add up over groups, by the name they are logged under."""
        return {
            "resampled_groups": float(self.attempt - 1),
            "resampled_members": float(self.resampled),
            "dropped_groups": float(self.left_out),
        }
