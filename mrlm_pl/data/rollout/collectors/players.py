"""The engine of a run and the players of its episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.collectors.stale_snapshots import StaleSnapshots
from mrlm_pl.engines import Engine, InProcessEngine, RoutingEngine, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.ranks import learner_place
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.rollout.play import Seat
from mrlm_pl.rollout.player import EpisodePlayer

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
        self._stale = stale
        self._players: dict[tuple[Sampling, bool], EpisodePlayer] = {}

    def engine(self, algorithm: Algorithm) -> Engine:
        """The engine of all policies; made when it is first asked for."""
        if self._routed is None:
            engine = self.given
            if engine is None:
                low = "bf16" in str(algorithm.trainer.precision)
                dtype = torch.bfloat16 if low else None
                engine = self._own = InProcessEngine(dtype=dtype, own_weights=self._own_weights)
            policies = {name: algorithm.policy(name) for name in algorithm.policies}
            if any(policy.served_by is not None for policy in policies.values()):
                from mrlm_pl.serving.policies.placement import with_served  # gRPC and aiohttp, which no other run needs

                engine = with_served(engine, policies)
            self._routed = engine
            self._routed.meet_learner(learner_place(algorithm.trainer))
        return self._routed

    def begin(self, algorithm: Algorithm, iteration: int, version: int) -> None:
        """Take the snapshots that are due at the beginning of an iteration."""
        if self._stale is not None:
            self._stale.begin(algorithm, iteration, version)

    def with_current_weights(self, algorithm: Algorithm, version: int, play: Callable[[], T]) -> T:
        """What ``play`` gives while the weights are whole and the engine has them; all ranks must ask together."""
        was_training = algorithm.training
        algorithm.eval()
        try:
            with torch.no_grad(), algorithm.gathered():
                self._load(algorithm, version)
                return play()
        finally:
            algorithm.train(was_training)

    def publish(self, algorithm: Algorithm, version: int) -> None:
        """Give the engine the current weights; all ranks must ask together."""
        with torch.no_grad(), algorithm.gathered():
            self._load(algorithm, version)

    def _load(self, algorithm: Algorithm, version: int) -> None:
        engine = self.engine(algorithm)
        for name in algorithm.policies:
            if algorithm.policy(name).served_by is None:
                engine.load(name, algorithm.policy(name).network, version)
        if self._stale is not None:
            self._stale.load_into(engine)
        check, self.check = self.check, None
        if check is not None:
            check(engine)

    def player(self, algorithm: Algorithm, sampling: Sampling, crossed: bool = False) -> EpisodePlayer:
        """The player whose calling thread computes for the engine; ``crossed``: snapshots sample some turns."""
        key = (sampling, crossed and self._stale is not None)
        if key not in self._players:
            self._players[key] = self.make(algorithm, sampling, self.engine(algorithm), crossed=crossed)
        return self._players[key]

    def make(
        self,
        algorithm: Algorithm,
        sampling: Sampling,
        engine: Engine,
        loop: EventLoopThread | None = None,
        crossed: bool = False,
    ) -> EpisodePlayer:
        """A new player, which whoever asked for it closes; the arguments are those of :meth:`player`."""
        agents = [agent for environment in self.environments.values() for agent in environment.agents]
        seats = {agent: self._seat(algorithm, agent, sampling, crossed) for agent in agents}
        return EpisodePlayer(self.environments, seats, engine, **self._options, loop=loop)

    def _seat(self, algorithm: Algorithm, agent: str, sampling: Sampling, crossed: bool) -> Seat:
        name = algorithm.seat(agent)
        policy = algorithm.policy(name)
        cross_policy: CrossPolicy | None = None
        if crossed and self._stale is not None and self._stale.covers(algorithm, name):
            cross_policy = self._stale.options
        return Seat(name, policy.chat, sampling, policy.context_window, cross_policy)

    def close(self) -> None:
        """Close the players and the engines that were made here; may be called twice."""
        for player in self._players.values():
            player.close()
        self._players = {}
        if self._stale is not None:
            self._stale.close()
        if isinstance(self._routed, RoutingEngine):
            self._routed.close_elsewhere()
        if self._own is not None:
            self._own.close()
        self._own = self._routed = None
