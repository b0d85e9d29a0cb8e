"""Collectors of rollouts, and the one that plays while the learner waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collectors.groups import Collected, GroupDraft, GroupPlan
from mrlm_pl.data.rollout.collectors.players import Players
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import TreePlayer
from mrlm_pl.trainer.termination import leaving_at_sigterm

T = TypeVar("T")


class Collector:
    """Plays the episodes that are due in groups, in lockstep: all decisions of a wave in one engine call.

    Args:
        players: of the run.
        plan: which episodes there are.
        sampling: how turns are sampled.

    Attributes:
        playing: the players of episodes, once they are made.
        training: plays the episodes that train.
        greedy: plays the greedy episode of each group, where the algorithm compares with it.
        trees: plays turn trees, where the algorithm trains on them.
    """

    playing: Sequence[EpisodePlayer] = ()
    training: EpisodePlayer
    greedy: EpisodePlayer | None
    trees: TreePlayer | None

    def __init__(self, players: Players, plan: GroupPlan, sampling: Sampling) -> None:
        self.players, self.plan, self.sampling = players, plan, sampling

    def make_players(self, **options: Any) -> None:
        """Make the players, with options of :meth:`Players.player`."""
        learner, sampling = self.players.learner, self.sampling
        self.training, self.greedy = self.players.player(sampling, crossed=True, **options), None
        if learner.uses_greedy_baseline:
            self.greedy = self.players.player(replace(sampling, temperature=0.0, top_p=1.0, top_k=0), **options)
        self.playing = [player for player in (self.training, self.greedy) if player is not None]
        tree = learner.turn_tree
        self.trees = None if tree is None else TreePlayer(self.training, tree, self.plan.group_sizes)

    async def play(self, player: EpisodePlayer | TreePlayer, specs: Sequence[EpisodeSpec]) -> Sequence[Any]:
        """Return the results of a player: an episode for each spec, or the paths of its turn tree."""
        return await player.play(specs)

    async def play_due(self, drafts: Sequence[GroupDraft]) -> None:
        """Play the episodes that are due in these groups once, and add them."""
        due = [draft.specs() for draft in drafts]
        played = iter(await self.play(self.trees or self.training, [*chain.from_iterable(due)]))
        for draft, specs in zip(drafts, due, strict=True):
            draft.take(next(played) if self.trees else [next(played) for _ in specs])

    async def play_greedy(self, iteration: int, groups: Sequence[int]) -> list[Episode]:
        """Return the greedy episode of each group; none where the algorithm does not use them."""
        if self.greedy is None:
            return []
        return list(await self.play(self.greedy, [self.plan.greedy(iteration, group) for group in groups]))

    def state(self) -> dict[str, Any] | None:
        """Return the groups that are played ahead, for a checkpoint; None without any."""
        return None

    def close(self) -> None:
        """Stop all episodes; may be called twice."""


class SyncCollector(Collector):
    """Plays all groups of an iteration side by side, with the current weights."""

    def collect(self, iteration: int, iterations: int, groups: Sequence[int]) -> Collected:
        """Return the episodes of these groups of an iteration; every rank calls it, with its own groups.

        Raises:
            SIGTERMException: on all ranks, when SIGTERM has interrupted one of them.
        """
        trainer = self.players.learner.trainer
        self.make_players()
        collected, stopped = Collected(), False
        if self.greedy is not None:
            try:
                collected.greedy = self._play(partial(self.play_greedy, iteration, groups))
            except SIGTERMException:
                stopped = True
        drafts = [GroupDraft(self.plan, iteration, group) for group in groups]
        while True:
            due = [draft for draft in drafts if draft.due]
            left = sum_over_ranks(trainer, torch.tensor(math.inf if stopped else float(len(due))))
            if math.isinf(left):
                raise SIGTERMException
            if not left:
                break  # as long as one rank plays, all gather the weights
            try:
                self._play(partial(self.play_due, due))
            except SIGTERMException:
                stopped = True
        for draft in drafts:
            collected.add(draft.collected())
        return collected

    def _play(self, play: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Play a coroutine with the current weights; SIGTERM may interrupt it.

        It interrupts the playing alone: all ranks gather the weights together, so that none may leave in between.
        """

        def leaving() -> T:
            with leaving_at_sigterm(self.players.learner.trainer):
                return self.training.run_blocking(play)

        return self.players.publish(leaving)
