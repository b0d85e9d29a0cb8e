"""The engine of a run, the players of its episodes, and the stale snapshots that sample some of the turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.data.rollout.metrics import distinct_turns
from mrlm_pl.engines import Engine, InProcessEngine, RoutingEngine, Sampling
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.environment import Environment
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.contract import RolloutLearner
from mrlm_pl.policy.snapshot import Snapshot
from mrlm_pl.rollout.cross_policy import CrossPolicy, slot_name
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.trainer.termination import ended_by_sigterm


class StaleSnapshots:
    """The snapshots of every trained policy of a run.

    They are made in the first iteration, and are the same on all ranks.

    Args:
        options: division of turns between the policy and its snapshots; see :class:`CrossPolicy`.
    """

    def __init__(self, options: CrossPolicy) -> None:
        self.options = options
        self._slots: dict[str, list[Snapshot]] = {}
        self._iteration = -1
        self._restored: dict[str, Any] | None = None
        self._loaded: dict[str, int] = {}

    def check(self, learner: RolloutLearner, trainer: Trainer, sampling: Sampling) -> None:
        """Validate that a run can train on stale turns.

        Raises:
            ConfigurationError: the run cannot train on them; the message has the reason and the remedy.
        """
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ConfigurationError(
                f"data.cross_policy cannot copy weights that {type(trainer.strategy).__name__} splits over processes; "
                "use one device or `--trainer.strategy ddp`, or leave it out"
            )
        named = [name for name in learner.policies if "@" in name]
        if named:
            raise ConfigurationError(
                f"data.cross_policy names snapshots POLICY@VERSION, and policy {named[0]!r} has such a name; rename it"
            )
        if not learner.weighs_sampler(sampling):
            raise ConfigurationError(
                f"data.cross_policy: {type(learner).__name__} would learn from a snapshot's turns as if the current "
                "weights had sampled them; give it a correction (`model.correction: {kind: truncated}`), or where its "
                "loss has a ratio `model.recompute_old_logp: false`"
            )

    def begin(self, learner: RolloutLearner, iteration: int, version: int) -> None:
        """Take the snapshots that are due at the beginning of an iteration; a second call has no effect."""
        if not self._slots:
            self._make(learner, version)
        if iteration <= self._iteration:
            return
        self._iteration = iteration
        if iteration and iteration % self.options.refresh == 0:
            for name, slots in self._slots.items():
                min(slots, key=lambda slot: slot.version).take(learner.policy(name), version)

    def load_into(self, engine: Engine) -> None:
        """Load the snapshots that changed since the last call into an engine."""
        for policy, slots in self._slots.items():
            for number, slot in enumerate(slots):
                name = slot_name(policy, number)
                if self._loaded.get(name) != slot.version:
                    engine.load(name, slot.network, slot.version)
                    self._loaded[name] = slot.version

    def metrics(self, episodes: Sequence[Episode], version: int) -> dict[str, tuple[float, float]]:
        """Return (sum, count) of the share of stale turns, and of the age of their snapshots in optimizer steps.

        Args:
            episodes: episodes of a collection.
            version: version of the weights that learn from it.
        """
        played = [episode for episode in episodes if not episode.failed]
        turns = [(turn, row) for turn, row in distinct_turns(played) if row.policy in self._slots]
        ages = [version - turn.version for turn, row in turns if turn.policy != row.policy]
        means = {"rollout/stale_turns": (float(len(ages)), float(len(turns)))}
        if ages:
            means["rollout/stale_age"] = (float(sum(ages)), float(len(ages)))
        return means

    def state(self) -> dict[str, Any] | None:
        """Return all snapshots with their weights, for the checkpoint; None before there are any."""
        if not self._slots:
            return self._restored
        slots = {name: [slot.state() for slot in slots] for name, slots in self._slots.items()}
        return {"iteration": self._iteration, "slots": slots}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore the value of :meth:`state`; if there are too many snapshots now, the oldest are removed."""
        self._slots, self._restored = {}, state

    def close(self) -> None:
        """Release the networks, keeping their state; they are built again on demand."""
        self._restored, self._slots, self._loaded = self.state(), {}, {}

    def _make(self, learner: RolloutLearner, version: int) -> None:
        restored: Mapping[str, Any] = self._restored or {"iteration": -1, "slots": {}}
        self._iteration, self._restored = restored["iteration"], None
        for name in learner.policies:
            if not learner.policy(name).trained:
                continue
            policy, count = learner.policy(name), self.options.snapshots
            slots = self._slots[name] = [Snapshot(policy, version) for _ in range(count)]
            saved = restored["slots"].get(name, [])
            if len(saved) != count:
                saved = sorted(saved, key=lambda state: state["version"])[-count:]
                saved = saved[:1] * (count - len(saved)) + saved
            for slot, state in zip(slots, saved, strict=False):
                slot.load_state(state)


class Players:
    """Makes and keeps a player for each way of sampling, and gives the engine its weights.

    Args:
        environments: environments by name.
        engine: engine that samples the turns; None is an in-process engine at the trainer's precision.
        own_weights: whether the weights may change while turns are sampled.
        options: arguments of every :class:`~mrlm_pl.rollout.player.EpisodePlayer`.
        stale: snapshots that sample some turns of players made with ``with_snapshots``; None turns this off.

    Attributes:
        configured_engine: the ``engine`` argument.
        learner: algorithm whose policies decide; set before anything is played.
        check_engine: function that is called with the engine once it has its first weights, before it samples; may
            raise.

    Raises:
        ConfigurationError: the weights may change while turns are sampled, but the engine has no weights of its own.
    """

    learner: RolloutLearner

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
                "are; set `own_weights: true` of InProcessEngine, or leave data.engine out"
            )
        self.environments, self._options = dict(environments), dict(options)
        self._attributes: dict[str, dict[str, list[Any]]] = {}  # of each environment, when episodes last began
        self.configured_engine, self._own_weights = engine, own_weights
        self.check_engine: Callable[[Engine], None] | None = None
        self._own: InProcessEngine | None = None
        self._routed: Engine | None = None
        self.stale = stale
        self._players: dict[tuple[Sampling, bool, EventLoopThread | None], EpisodePlayer] = {}

    @property
    def engine(self) -> Engine:
        """The engine of all policies, made when it is first read."""
        if self._routed is None:
            engine = self.configured_engine
            if engine is None:
                engine = self._own = InProcessEngine(own_weights=self._own_weights)
            policies = {name: self.learner.policy(name) for name in self.learner.policies}
            if any(policy.served_by is not None for policy in policies.values()):
                from mrlm_pl.serving.policies.placement import with_served  # gRPC and aiohttp, which no other run needs

                engine = with_served(engine, policies)
            self._routed = engine
            engine.meet_learner(LearnerPlace.of_trainer(self.learner.trainer))
        return self._routed

    @contextmanager
    def published(self) -> Iterator[None]:
        """Load the current weights into the engine; within the context they are whole. All ranks enter together.

        Raises:
            ConfigurationError: an environment has changed while episodes are playing.
        """
        self._renew_environments()
        learner = self.learner
        was_training = learner.training
        learner.train(False)
        try:
            with torch.no_grad(), learner.gathered():
                for name in learner.policies:
                    if learner.policy(name).served_by is None:
                        self.engine.load(name, learner.policy(name).network, learner.trainer.global_step)
                if self.stale is not None:
                    self.stale.load_into(self.engine)
                if self.check_engine is not None:
                    check, self.check_engine = self.check_engine, None
                    check(self.engine)
                yield
        finally:
            learner.train(was_training)

    def player(
        self,
        sampling: Sampling,
        with_snapshots: bool = False,
        engine: Engine | None = None,
        loop: EventLoopThread | None = None,
    ) -> EpisodePlayer:
        """Return the player for a way of sampling.

        Args:
            sampling: sampling settings of the turns.
            with_snapshots: whether snapshots sample some turns.
            engine: engine that samples the turns; None is :attr:`engine`.
            loop: event loop that plays the episodes, closed by the caller; None is the player's own loop.
        """
        key = (sampling, with_snapshots and self.stale is not None, loop)
        if key not in self._players:
            agents = [agent for environment in self.environments.values() for agent in environment.agents]
            seats = {agent: self._seat(agent, sampling, with_snapshots) for agent in agents}
            self._players[key] = EpisodePlayer(
                self.environments, seats, engine or self.engine, **self._options, loop=loop
            )
        return self._players[key]

    def play(self, specs: Sequence[EpisodeSpec], sampling: Sampling) -> list[Episode]:
        """Return episodes that the current weights played; all ranks call it."""
        sampling.check_policies([*self.learner.policies], "sampling")
        player = self.player(sampling)
        with ended_by_sigterm(self.learner.trainer), self.published():
            return player.play_blocking(specs)

    def resample(self, changes: Mapping[Sampling, Sampling]) -> None:
        """Let the players for these ways of sampling play in others, from the next episode on; none may be playing.

        Raises:
            ConfigurationError: episodes play between rollouts.
        """
        for key in [key for key in self._players if changes.get(key[0], key[0]) != key[0]]:
            _, with_snapshots, loop = key
            if loop is not None:
                raise ConfigurationError(
                    "data.sampling has changed while data.mode async plays episodes, some of which began before; use "
                    "`--data.mode sync`, or change it in `on_train_start` alone"
                )
            player, changed = self._players.pop(key), (changes[key[0]], with_snapshots, loop)
            player.seats = {agent: self._seat(agent, changed[0], with_snapshots) for agent in player.seats}
            if changed in self._players:
                self._players.pop(changed).close()  # of evaluations, which make it again
            self._players[changed] = player

    def _renew_environments(self) -> None:
        """Let the episodes that begin now play in the environments as they are now."""
        for name, environment in self.environments.items():
            now = public_attributes(environment)
            before, self._attributes[name] = self._attributes.get(name, now), now
            changed = [key for key in before | now if not _alike(before.get(key, []), now.get(key, []))]
            if not changed:
                continue
            if any(loop is not None for *_, loop in self._players):  # of episodes that play between rollouts
                raise ConfigurationError(
                    f"{changed[0]!r} of environment {name!r} has changed while data.mode async plays episodes in it, "
                    "some of which began before; use `--data.mode sync`, or change it in `on_train_start` alone"
                )
            for player in self._players.values():
                player.renew(name, environment)

    def _seat(self, agent: str, sampling: Sampling, with_snapshots: bool) -> Seat:
        name = self.learner.seat(agent)
        policy = self.learner.policy(name)
        snapshots = self.stale.options if with_snapshots and self.stale is not None and policy.trained else None
        return Seat(name, policy.chat, sampling.of(name), policy.context_window, snapshots, policy.vocabulary)

    def close(self) -> None:
        """Close the players and the engines that were made here; may be called twice."""
        players, engine, routed = self._players, self._own, self._routed
        self._players, self._own, self._routed, self._attributes = {}, None, None, {}
        with ExitStack() as stack:
            if engine is not None:
                stack.callback(engine.close)
            if isinstance(routed, RoutingEngine):
                stack.callback(routed.close_elsewhere)
            if self.stale is not None:
                stack.callback(self.stale.close)
            for player in players.values():
                stack.callback(player.close)


def public_attributes(environment: Environment, above: Sequence[Environment] = ()) -> dict[str, list[Any]]:
    """Return the public attributes of an environment, and of those that it wraps: by name the value and its members.

    Args:
        environment: environment with the attributes.
        above: environments that wrap it.

    >>> from types import SimpleNamespace
    >>> public_attributes(SimpleNamespace(bonus=0.5, weights={"form": 0.1}, _rows=None))
    {'bonus': [0.5], 'weights': [{'form': 0.1}, 'form', 0.1]}
    """
    parts: dict[str, list[Any]] = {}
    for name, value in vars(environment).items():
        if name.startswith("_"):  # such as data that are read when they are first needed
            continue
        members = [*value, *value.values()] if isinstance(value, dict) else value
        parts[name] = [value, *(members if isinstance(members, (list, tuple, set)) else ())]
        if isinstance(value, Environment) and not any(value is other for other in above):
            inner = public_attributes(value, [*above, environment])
            parts |= {f"{name}.{part}": objects for part, objects in inner.items()}
    return parts


def _alike(before: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether the parts of a value are the same objects, or equal numbers or texts."""
    return len(before) == len(now) and all(
        old is new or (type(old) is type(new) and isinstance(new, (bool, int, float, str)) and bool(old == new))
        for old, new in zip(before, now, strict=True)
    )
