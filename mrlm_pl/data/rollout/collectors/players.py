"""The engine of a run, and the players of its episodes and groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.collectors.groups import GroupDraft, GroupPlan
from mrlm_pl.data.rollout.collectors.stale_snapshots import StaleSnapshots
from mrlm_pl.engines import Engine, InProcessEngine, RoutingEngine, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.learner.ranks import learner_place
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import Branching, TreePlayer

T = TypeVar("T")


class Players:
    """Makes and keeps a player for each way of sampling, and gives the engine its weights.

    Args:
        environments: by name.
        engine: where turns are sampled; None is an in-process engine at the trainer's precision.
        own_weights: whether the weights may change while turns are sampled.
        options: of every :class:`~mrlm_pl.rollout.player.EpisodePlayer`.
        stale: snapshots that sample some turns of the players who are asked for with ``crossed``; None has none.

    Attributes:
        given: the ``engine``.
        check: is asked about the engine once it has its first weights, before it samples.

    Raises:
        ConfigurationError: the weights may change meanwhile, but the engine uses them where they are.
    """

    def __init__(
        self,
        environments: Mapping[str, Environment],
        engine: Engine | None,
        own_weights: bool,
        options: Mapping[str, Any],
        stale: StaleSnapshots | None = None,
    ) -> None:
        if own_weights and engine is not None and not engine.holds_weights:
            raise ConfigurationError(
                f"data.mode async samples while the weights change, but {type(engine).__name__} reads them where they "
                "are; set `own_weights: true` for it, or leave data.engine out"
            )
        self.environments, self._options = dict(environments), dict(options)
        self.given, self._own_weights = engine, own_weights
        self.check: Callable[[Engine], None] | None = None
        self._own: InProcessEngine | None = None
        self._routed: Engine | None = None
        self.stale = stale
        self._players: dict[tuple[Sampling, bool], EpisodePlayer] = {}

    def engine(self, learner: RolloutLearner) -> Engine:
        """Return the engine of all policies; the first call makes it."""
        if self._routed is None:
            engine = self.given
            if engine is None:
                low = "bf16" in str(learner.trainer.precision)
                dtype = torch.bfloat16 if low else None
                engine = self._own = InProcessEngine(dtype=dtype, own_weights=self._own_weights)
            policies = {name: learner.policy(name) for name in learner.policies}
            if any(policy.served_by is not None for policy in policies.values()):
                from mrlm_pl.serving.policies.placement import with_served  # gRPC and aiohttp, which no other run needs

                engine = with_served(engine, policies)
            self._routed = engine
            self._routed.meet_learner(learner_place(learner.trainer))
        return self._routed

    def begin(self, learner: RolloutLearner, iteration: int, version: int) -> None:
        """Take the snapshots that are due at the beginning of an iteration."""
        if self.stale is not None:
            self.stale.begin(learner, iteration, version)

    def with_current_weights(self, learner: RolloutLearner, version: int, play: Callable[[], T]) -> T:
        """Return the value of ``play`` with whole weights in the engine; all ranks must call it together."""
        was_training = learner.training
        learner.train(False)
        try:
            with torch.no_grad(), learner.gathered():
                self._load(learner, version)
                return play()
        finally:
            learner.train(was_training)

    def publish(self, learner: RolloutLearner, version: int) -> None:
        """Give the engine the current weights; all ranks must call it together."""
        with torch.no_grad(), learner.gathered():
            self._load(learner, version)

    def _load(self, learner: RolloutLearner, version: int) -> None:
        engine = self.engine(learner)
        for name in learner.policies:
            if learner.policy(name).served_by is None:
                engine.load(name, learner.policy(name).network, version)
        if self.stale is not None:
            self.stale.load_into(engine)
        check, self.check = self.check, None
        if check is not None:
            check(engine)

    def player(self, learner: RolloutLearner, sampling: Sampling, crossed: bool = False) -> EpisodePlayer:
        """Return the player for a way of sampling; ``crossed``: snapshots sample some turns."""
        key = (sampling, crossed and self.stale is not None)
        if key not in self._players:
            self._players[key] = self._make(learner, sampling, self.engine(learner), crossed=crossed)
        return self._players[key]

    def of_groups(
        self,
        learner: RolloutLearner,
        plan: GroupPlan,
        sampling: Sampling,
        engine: Engine | None = None,
        loop: EventLoopThread | None = None,
        slots: AbstractAsyncContextManager[Any] | None = None,
    ) -> GroupPlayer:
        """Return the player of groups.

        Args:
            learner: whose policies decide.
            plan: which episodes there are.
            sampling: how turns are sampled.
            engine: with a ``loop``: where they are sampled.
            loop: where new players play, which the caller closes; None takes those that are kept here.
            slots: see :class:`GroupPlayer`.
        """

        def player(sampling: Sampling, crossed: bool) -> EpisodePlayer:
            if engine is None:
                return self.player(learner, sampling, crossed)
            return self._make(learner, sampling, engine, loop, crossed)

        greedy = player(greedily(sampling), False) if learner.uses_greedy_baseline else None
        return GroupPlayer(plan, learner.turn_tree, player(sampling, True), greedy, slots)

    def _make(
        self,
        learner: RolloutLearner,
        sampling: Sampling,
        engine: Engine,
        loop: EventLoopThread | None = None,
        crossed: bool = False,
    ) -> EpisodePlayer:
        agents = [agent for environment in self.environments.values() for agent in environment.agents]
        seats = {agent: self._seat(learner, agent, sampling, crossed) for agent in agents}
        return EpisodePlayer(self.environments, seats, engine, **self._options, loop=loop)

    def _seat(self, learner: RolloutLearner, agent: str, sampling: Sampling, crossed: bool) -> Seat:
        name = learner.seat(agent)
        policy = learner.policy(name)
        cross_policy: CrossPolicy | None = None
        if crossed and self.stale is not None and self.stale.covers(learner, name):
            cross_policy = self.stale.options
        return Seat(name, policy.chat, sampling, policy.context_window, cross_policy)

    def close(self) -> None:
        """Close the players and the engines that were made here; may be called twice."""
        for player in self._players.values():
            player.close()
        self._players = {}
        if self.stale is not None:
            self.stale.close()
        if isinstance(self._routed, RoutingEngine):
            self._routed.close_elsewhere()
        if self._own is not None:
            self._own.close()
        self._own = self._routed = None


class GroupPlayer:
    """Plays the episodes that are due in groups.

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
        tree: Branching | None,
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
        """Play the episodes that are due in these groups once, and add them."""
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
