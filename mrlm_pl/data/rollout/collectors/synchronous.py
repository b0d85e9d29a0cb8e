"""Collections that are played while the learner waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collectors.groups import GroupDraft, GroupPlan
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.turn_tree import TreePlayer

T = TypeVar("T")


@dataclass
class Collected:
    """What was played for the groups of an iteration.

    Args:
        episodes: those that are learnt from, group after group.
        replaced: others that were played.
        greedy: one greedy episode of the task of each group, where the algorithm compares with them.
        counts: what became of the groups, as numbers that add up, by the name they are logged under.
        metrics: what else is to be logged, as (sum, count) of means by name.
        seconds: in which so many episodes are played; None: as long as it took to collect them.
        earlier_tokens: that were sampled in these seconds for collections before.
    """

    episodes: list[Episode] = field(default_factory=list)
    replaced: list[Episode] = field(default_factory=list)
    greedy: list[Episode] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float | None = None
    earlier_tokens: float = 0.0

    def add(self, other: Collected) -> None:
        """Append the episodes of another part of the collection."""
        self.episodes += other.episodes
        self.replaced += other.replaced
        self.greedy += other.greedy
        self.counts = {
            name: self.counts.get(name, 0.0) + other.counts.get(name, 0.0) for name in {**self.counts, **other.counts}
        }

    @classmethod
    def of(cls, draft: GroupDraft, greedy: Sequence[Episode] = ()) -> Collected:
        """What was played of a group that is complete."""
        return cls(list(draft.kept()), list(draft.others()), list(greedy), draft.counts())


def greedily(sampling: Sampling) -> Sampling:
    """The sampling with the most probable token at every step."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)


def greedy_spec(plan: GroupPlan, iteration: int, group: int) -> EpisodeSpec:
    """The greedy episode of a group's first task."""
    return replace(plan.root(iteration, group), id=f"{iteration}-{group}-greedy")


class SyncCollector:
    """Plays all groups of an iteration side by side, with the current weights.

    Args:
        players: who plays.
        algorithm: whose policies decide.
        plan: which episodes there are.
        sampling: how turns are sampled.
        over_ranks: the sum of a number over all ranks.
        leaving: a context in which SIGTERM interrupts what this rank plays.
    """

    def __init__(
        self,
        players: Players,
        algorithm: Algorithm,
        plan: GroupPlan,
        sampling: Sampling,
        over_ranks: Callable[[float], float],
        leaving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.players, self.algorithm, self.plan, self.sampling = players, algorithm, plan, sampling
        self.over_ranks, self.leaving = over_ranks, leaving

    def collect(self, iteration: int, version: int, groups: Sequence[int]) -> Collected:
        """The episodes of these groups; every rank must ask, for groups of its own.

        Raises:
            SIGTERMException: on all ranks, when SIGTERM has interrupted one of them.
        """
        collected, stopped = Collected(), False
        if self.algorithm.uses_greedy_baseline:
            specs = [greedy_spec(self.plan, iteration, group) for group in groups]
            try:
                collected.greedy = self.play(specs, greedily(self.sampling), version)
            except SIGTERMException:
                stopped = True
        drafts = [GroupDraft(self.plan, iteration, group) for group in groups]
        while True:
            due = [draft for draft in drafts if draft.due]
            left = self.over_ranks(math.inf if stopped else float(len(due)))
            if math.isinf(left):
                raise SIGTERMException
            if not left:
                break  # as long as one rank goes on, all gather the weights
            try:
                played = self._play(due, version)
            except SIGTERMException:
                stopped = True
                continue
            for draft, episodes in zip(due, played, strict=True):
                draft.take(episodes)
        for draft in drafts:
            collected.add(Collected.of(draft))
        return collected

    def play(
        self, specs: Sequence[EpisodeSpec], sampling: Sampling, version: int, crossed: bool = False
    ) -> list[Episode]:
        """These episodes, played with the current weights; ``crossed``: snapshots sample some of the turns."""
        player = self.players.player(self.algorithm, sampling, crossed)
        return self._with_current_weights(version, lambda: player.play_blocking(specs))

    def _with_current_weights(self, version: int, play: Callable[[], T]) -> T:
        """What ``play`` gives with the current weights, which SIGTERM may interrupt.

        It interrupts the playing alone: all ranks gather the weights together, so that none may leave in between.
        """

        def leaving() -> T:
            with self.leaving():
                return play()

        return self.players.with_current_weights(self.algorithm, version, leaving)

    def _play(self, drafts: Sequence[GroupDraft], version: int) -> list[list[Episode]]:
        """What is due of each group: separate episodes, or the paths of its turn tree."""
        tree = self.algorithm.turn_tree
        if tree is None:
            specs = [draft.specs() for draft in drafts]
            episodes = iter(self.play([spec for due in specs for spec in due], self.sampling, version, crossed=True))
            return [[next(episodes) for _ in due] for due in specs]
        player = TreePlayer(
            self.players.player(self.algorithm, self.sampling, crossed=True), tree, self.plan.group_sizes
        )
        roots = [draft.root() for draft in drafts]
        return self._with_current_weights(version, lambda: player.play_blocking(roots))
