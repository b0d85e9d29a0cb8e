"""Plays the groups of either collector: separate episodes or turn trees, and the greedy baseline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

from mrlm_pl.data.rollout.collectors.groups import GroupDraft, GroupPlan
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.turn_tree import TreePlayer, TurnTree


class GroupPlayer:
    """Plays what is due of groups.

    Args:
        plan: which episodes there are.
        tree: how the decisions of a state branch; None plays separate episodes.
        training: plays the episodes that train.
        greedy: plays the greedy episode of each group; None plays none.
        slots: entered by every episode, or turn tree, which then plays by itself. None plays all that is due in
            lockstep, with one engine call for all of its decisions.
    """

    def __init__(
        self,
        plan: GroupPlan,
        tree: TurnTree | None,
        training: EpisodePlayer,
        greedy: EpisodePlayer | None,
        slots: AbstractAsyncContextManager[Any] | None = None,
    ) -> None:
        self.plan, self.training, self.greedy, self.slots = plan, training, greedy, slots
        self.trees = None if tree is None else TreePlayer(training, tree, plan.group_sizes)

    @property
    def players(self) -> list[EpisodePlayer]:
        """The players of episodes."""
        return [player for player in (self.training, self.greedy) if player is not None]

    async def play_due(self, drafts: Sequence[GroupDraft]) -> None:
        """Play what is due of these groups once, and add it to them."""
        if self.trees is not None:
            found = await self._trees([draft.root() for draft in drafts])
        else:
            specs = [draft.specs() for draft in drafts]
            episodes = iter(await self._episodes(self.training, [*chain.from_iterable(specs)]))
            found = [[next(episodes) for _ in due] for due in specs]
        for draft, played in zip(drafts, found, strict=True):
            draft.take(played)

    async def play_greedy(self, iteration: int, groups: Sequence[int]) -> list[Episode]:
        """Return the greedy episode of each group; none where the algorithm does not use them."""
        if self.greedy is None:
            return []
        return await self._episodes(self.greedy, [self.plan.greedy(iteration, group) for group in groups])

    async def _trees(self, roots: Sequence[EpisodeSpec]) -> list[list[Episode]]:
        assert self.trees is not None
        if self.slots is None:
            return await self.trees.play(roots)
        async with self.slots:
            return await self.trees.play(roots)

    async def _episodes(self, player: EpisodePlayer, specs: Sequence[EpisodeSpec]) -> list[Episode]:
        if self.slots is None:
            return await player.play(specs)
        return list(await asyncio.gather(*(self._alone(player, spec) for spec in specs)))

    async def _alone(self, player: EpisodePlayer, spec: EpisodeSpec) -> Episode:
        assert self.slots is not None
        async with self.slots:
            (episode,) = await player.play([spec])
        return episode


def greedily(sampling: Sampling) -> Sampling:
    """Return the sampling that takes the most probable token at every step."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
