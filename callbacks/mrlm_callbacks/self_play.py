"""Self-play: the opponent plays with weights that the learner had before."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from mrlm_callbacks.anchor_games import AnchorGames, CollapseAlarm, check_language
from mrlm_callbacks.snapshot_pool import INITIAL, Draw, SnapshotPool, check_fit, load_snapshot, weights_of
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.collection import CollectionObserver
from mrlm_pl.data.rollout.module import rollouts_of
from mrlm_pl.durable_files import write_json
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.evaluation.elo import GameTable, elo_ratings, game_score
from mrlm_pl.learner.ranks import gather_ranks
from mrlm_pl.policy.lora import merged_state
from mrlm_pl.rollout.cross_policy import stale_turns
from mrlm_pl.settings import PositiveInt, at_least, check_arguments

logger = logging.getLogger(__name__)


class SelfPlay(Callback, CollectionObserver):
    """Gives a frozen opponent the weights of past snapshots of the learner, and measures the learner.

    Before each iteration a snapshot is drawn, by a counter-based seed, and put into the opponent. The learner is rated
    on the Elo scale from the games that it trains on and those against anchors; the rating of the initial snapshot is
    0, and players whom no chain of games links with it have no rating. Anchors are opponents that never change, since
    in self-play the reward stays about 0 whether the learner improves or forgets; the alarm watches the scores against
    them. A game's score is 1, 0.5 or 0 if the learner's agents earned more than the opponent's, as much, or less.

    Logged after each iteration: ``self_play/score`` of its games, ``self_play/opponent`` (number of the snapshot),
    ``self_play/pool`` (snapshots in it), ``self_play/elo``, ``elo_low``, ``elo_high`` and ``opponent_elo``; and when
    the anchors were played ``self_play/NAME/score``, ``low``, ``high``, ``wins`` and ``draws`` for each anchor and
    ``self_play/alarm`` (1 when one was raised). ``RUN/self_play.json`` has the ratings of all snapshots and all scores
    against anchors, those before training included.

    Everything that decides the future is in the checkpoint, the weights of the pool included. With LoRA a snapshot is
    the adapter alone.

    Args:
        learner: name of the trained policy.
        opponent: name of a frozen policy of the same model, whose weights are replaced.
        snapshot_every: iterations between two snapshots.
        pool_size: maximum number of snapshots; the initial one stays, and the oldest of the others is removed.
        draw: rule that draws the opponent: ``uniform``, ``latest`` or ``prioritized``; see :class:`SnapshotPool`.
        anchors: settings of the games against anchors, which measure the learner.
        alarm: definition of a collapse, and the reaction to it.

    Raises:
        ConfigurationError: a number is out of range; in a run, the policies, seats or strategy do not allow self-play.
    """

    @check_arguments
    def __init__(
        self,
        learner: str = "learner",
        opponent: str = "opponent",
        snapshot_every: PositiveInt = 10,
        pool_size: Annotated[int, at_least(2)] = 8,
        draw: Draw = "uniform",
        anchors: AnchorGames = AnchorGames(),  # noqa: B008 (frozen)
        alarm: CollapseAlarm = CollapseAlarm(),  # noqa: B008 (frozen)
    ) -> None:
        self.learner, self.opponent, self.snapshot_every = learner, opponent, snapshot_every
        self.anchors, self.alarm = anchors, alarm
        self.pool = SnapshotPool(pool_size, draw)
        self.table = GameTable()
        self.history: list[dict[str, Any]] = []
        self._drawn = (-1, INITIAL)  # iteration, snapshot
        self._score = float("nan")
        self._anchor_weights: dict[str, dict[str, Tensor]] = {}
        self._sides: dict[str, tuple[list[str], list[str]]] = {}

    # Lightning's hooks, in the order in which a run meets them.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        algorithm = self._data(trainer).algorithm()
        if self._data(trainer).collection.max_lag:
            raise ConfigurationError(
                "SelfPlay seats an opponent for each iteration, but with data.mode async episodes of later iterations "
                "are under way when it changes; use `--data.mode sync`"
            )
        kinds = {name: "trained" if algorithm.policy(name).trained else "frozen" for name in algorithm.policies}
        for name, kind in ((self.learner, "trained"), (self.opponent, "frozen")):
            if kinds.get(name) != kind:
                raise ConfigurationError(
                    f"SelfPlay needs a {kind} policy {name!r}; policies are {kinds}; name them with `learner` and "
                    "`opponent`, and set `trained: false` for the opponent"
                )
        if algorithm.policy(self.opponent).int8 is not None:
            raise ConfigurationError(
                f"SelfPlay replaces the weights of {self.opponent!r} by snapshots in float32, but its int8 is "
                f"{algorithm.policy(self.opponent).int8!r}; leave `int8` out"
            )
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ConfigurationError(
                f"SelfPlay cannot copy weights that {type(trainer.strategy).__name__} splits over processes; use one "
                "device or `--trainer.strategy ddp`"
            )
        check_language(algorithm.policy(self.opponent), algorithm.policy(self.learner), "the learner")
        self._sides = self._find_sides(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        algorithm, data = self._data(trainer).algorithm(), self._data(trainer)
        learner, opponent = algorithm.policy(self.learner), algorithm.policy(self.opponent)
        merged = merged_state(learner.network) if learner.lora else dict(learner.network.named_parameters())
        check_fit(opponent, merged, f"the learner's {learner.name_or_path!r}")
        self._anchor_weights = self.anchors.read(opponent)
        if not self.pool.snapshots:
            self.pool.add(INITIAL, weights_of(learner))
            for name, result in self._play_anchors(trainer).items():
                self.history.append({"iteration": data.stream.iteration, "anchor": name, **result, "alarm": None})
            self._log_anchors(trainer)
        elif self._drawn[0] < data.stream.iteration:  # a signal has ended the run in the games against anchors
            self._end_iteration(trainer)
        elif self.alarm.action == "stop" and any(row["alarm"] is not None for row in self._latest()):
            trainer.should_stop = True  # again, in a run that is resumed
        self._seat_opponent(trainer)

    def on_collection(self, trainer: Any, episodes: Sequence[Episode]) -> None:
        """Count the games of the iteration that begins; see :meth:`CollectionObserver.on_collection`."""
        counted = [episode for episode in episodes if self._counts(episode)]
        local_scores = [game_score(episode, *self._sides[episode.task.environment]) for episode in counted]
        scores = [score for rank_scores in gather_ranks(trainer, local_scores) for score in rank_scores]
        if not scores:  # the tasks of a run with several environments may all have been of the others
            return
        _, number = self._drawn
        self.table.add(self._player(self._data(trainer).stream.iteration), str(number), sum(scores), len(scores))
        self._score = sum(scores) / len(scores)
        self.pool.record_score(number, self._score)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._data(trainer).stream.position == 0:
            self._end_iteration(trainer)

    def _end_iteration(self, trainer: Trainer) -> None:
        """Measure the learner, take the snapshot that is due and seat the next opponent."""
        data, (_, opponent) = self._data(trainer), self._drawn
        logged = {"score": self._score, "opponent": float(opponent), "pool": float(len(self.pool.snapshots))}
        last = trainer.max_epochs is not None and data.stream.iteration == trainer.max_epochs * data.stream.iterations
        due = last or data.stream.iteration % self.anchors.every == 0
        if due:
            self._measure(trainer)
        ratings = elo_ratings(self.table, zero=str(INITIAL))
        if rating := ratings.get(self._player(data.stream.iteration - 1)):
            logged |= {"elo": rating.elo, "elo_low": rating.low, "elo_high": rating.high}
        if rating := ratings.get(str(opponent)):
            logged["opponent_elo"] = rating.elo
        values = {f"self_play/{name}": value for name, value in logged.items()}
        self._data(trainer).algorithm().metrics.log(values, lambda name: name == "self_play/elo")
        if data.stream.iteration % self.snapshot_every == 0:
            self.pool.add(data.stream.iteration, weights_of(self._data(trainer).algorithm().policy(self.learner)))
        self._score = float("nan")
        self._seat_opponent(trainer)
        if trainer.is_global_zero and due:
            report = {"ratings": {name: vars(rating) for name, rating in ratings.items()}, "anchors": self.history}
            write_json(Path(trainer.default_root_dir) / "self_play.json", report)

    def state_dict(self) -> dict[str, Any]:
        return {
            "pool": self.pool.state_dict(),
            "table": dict(self.table),
            "history": self.history,
            "drawn": self._drawn,
            "score": self._score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pool.load_state_dict(state_dict["pool"])
        self.table = GameTable(state_dict["table"])
        self.history = list(state_dict["history"])
        self._drawn, self._score = state_dict["drawn"], state_dict["score"]

    # The opponent.

    def _seat_opponent(self, trainer: Trainer) -> None:
        """Put the weights of this iteration's snapshot into the opponent."""
        data = self._data(trainer)
        drawn_at, number = self._drawn
        if drawn_at != data.stream.iteration or number not in self.pool.snapshots:
            self._drawn = (data.stream.iteration, self.pool.draw_number(data.seed, data.stream.iteration))
        self._load_opponent(trainer, self.pool.snapshots[self._drawn[1]])

    def _load_opponent(self, trainer: Trainer, weights: Mapping[str, Tensor]) -> None:
        algorithm = self._data(trainer).algorithm()
        load_snapshot(algorithm.policy(self.opponent), weights, algorithm.policy(self.learner))

    # Measurements.

    def _play_anchors(self, trainer: Trainer) -> dict[str, dict[str, float]]:
        """Return the results against each anchor; the last one stays in the opponent's seat."""
        results = {}
        for name, weights in {"initial": self.pool.snapshots[INITIAL], **self._anchor_weights}.items():
            self._load_opponent(trainer, weights)
            results[name] = self.anchors.play(self._data(trainer), self._sides)
        return results

    def _measure(self, trainer: Trainer) -> None:
        """Play the anchors, and raise the alarm if need be."""
        iteration = self._data(trainer).stream.iteration
        for name, result in self._play_anchors(trainer).items():
            score, games = result["score"], int(result["games"])
            before = [row["score"] for row in self.history if row["anchor"] == name]
            reason = self.alarm.reason(score, max([score, *before]))
            self.history.append({"iteration": iteration, "anchor": name, **result, "alarm": reason})
            player = str(INITIAL) if name == "initial" else f"anchor {name}"
            self.table.add(self._player(iteration - 1), player, score * games, games)
            if reason is not None:
                self._raise_alarm(trainer, name, reason)
        self._log_anchors(trainer)

    def _log_anchors(self, trainer: Trainer) -> None:
        """Log the latest scores against the anchors, in the row of the update before, or of the first one."""
        latest = self._latest()
        metrics = {"self_play/alarm": float(any(row["alarm"] is not None for row in latest))}
        keys = ("score", "low", "high", "wins", "draws")
        metrics |= {f"self_play/{row['anchor']}/{key}": row[key] for row in latest for key in keys}
        self._data(trainer).algorithm().metrics.log(metrics)

    def _latest(self) -> list[dict[str, Any]]:
        """Return the last results against the anchors."""
        return [row for row in self.history if row["iteration"] == self.history[-1]["iteration"]]

    def _raise_alarm(self, trainer: Trainer, anchor: str, reason: str) -> None:
        iteration = self._data(trainer).stream.iteration
        stop = self.alarm.action == "stop"
        if trainer.is_global_zero:
            level = logging.ERROR if stop else logging.WARNING
            end = "the run stops" if stop else "look at the run, and lower the learning rate or draw older opponents"
            logger.log(level, "collapse at iteration %d: the score against %s, %s; %s", iteration, anchor, reason, end)
        trainer.should_stop = trainer.should_stop or stop

    def _player(self, iteration: int) -> str:
        """Return the player that an iteration trains: the next snapshot."""
        return str((iteration // self.snapshot_every + 1) * self.snapshot_every)

    def _counts(self, episode: Episode) -> bool:
        """Return whether the current learner played all of an episode: no stale snapshot sampled a turn."""
        return not episode.failed and episode.task.environment in self._sides and not stale_turns(episode)

    # The trainer's objects.

    def _find_sides(self, trainer: Trainer) -> dict[str, tuple[list[str], list[str]]]:
        """Return agents of the learner and of the opponent, by environment, where both play."""
        algorithm = self._data(trainer).algorithm()
        sides = {}
        for name, environment in self._data(trainer).environments.items():
            learner_agents, opponent_agents = (
                [agent for agent in environment.agents if algorithm.seat(agent) == policy]
                for policy in (self.learner, self.opponent)
            )
            if learner_agents and opponent_agents:
                sides[name] = (learner_agents, opponent_agents)
        if not sides:
            raise ConfigurationError(
                f"SelfPlay: in no environment do both {self.learner!r} and {self.opponent!r} have a seat; bind an "
                "agent to each with `seats`"
            )
        return sides

    def _data(self, trainer: Any) -> RolloutDataModule:
        return rollouts_of(trainer, "SelfPlay")
