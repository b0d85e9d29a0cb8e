"""Collections that are played while the learner waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data.rollout.collectors.groups import Collected, GroupDraft
from mrlm_pl.data.rollout.collectors.players import GroupPlayer, Players
from mrlm_pl.learner.contract import RolloutLearner

T = TypeVar("T")


class SyncCollector:
    """Plays all groups of an iteration side by side, with the current weights.

    Args:
        players: give the engine its weights.
        learner: whose policies decide.
        player: plays the groups.
        over_ranks: the sum of a number over all ranks.
        leaving: a context in which SIGTERM interrupts the episodes of this rank.
    """

    def __init__(
        self,
        players: Players,
        learner: RolloutLearner,
        player: GroupPlayer,
        over_ranks: Callable[[float], float],
        leaving: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.players, self.learner, self.player = players, learner, player
        self.over_ranks, self.leaving = over_ranks, leaving

    def collect(self, iteration: int, version: int, groups: Sequence[int]) -> Collected:
        """Return the episodes of these groups; every rank calls it, with its own groups.

        Raises:
            SIGTERMException: on all ranks, when SIGTERM has interrupted one of them.
        """
        collected, stopped = Collected(), False
        if self.player.greedy is not None:
            try:
                collected.greedy = self._play(version, partial(self.player.play_greedy, iteration, groups))
            except SIGTERMException:
                stopped = True
        drafts = [GroupDraft(self.player.plan, iteration, group) for group in groups]
        while True:
            due = [draft for draft in drafts if draft.due]
            left = self.over_ranks(math.inf if stopped else float(len(due)))
            if math.isinf(left):
                raise SIGTERMException
            if not left:
                break  # as long as one rank plays, all gather the weights
            try:
                self._play(version, partial(self.player.play_due, due))
            except SIGTERMException:
                stopped = True
        for draft in drafts:
            collected.add(draft.collected())
        return collected

    def _play(self, version: int, play: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Play a coroutine with the current weights; SIGTERM may interrupt it.

        It interrupts the playing alone: all ranks gather the weights together, so that none may leave in between.
        """

        def leaving() -> T:
            with self.leaving():
                return self.player.training.run_blocking(play)

        return self.players.with_current_weights(self.learner, version, leaving)
