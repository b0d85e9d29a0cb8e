"""The tasks of a run: its environments with their settings, the order of their tasks, and a curriculum over them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mrlm_pl.environment import Environment, TaskSource
from mrlm_pl.episode import Episode, Task, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.seeding import keyed_random
from mrlm_pl.settings import (
    FractionAboveZero,
    PositiveFloat,
    PositiveInt,
    Settings,
    UnitInterval,
    check_instance,
    one_of,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SuccessRateCurriculum(Settings):
    """Gives environments that are neither always nor never solved more of the tasks.

    With ``b_e`` the share of an environment by ``data.weights`` and ``p_e`` its success rate, a moving average over the
    iterations that it was played in::

        share_e = floor b_e + (1 - floor) b_e v_e / sum_k(b_k v_k),   v_e = p_e (1 - p_e)
        p_e    <- p_e + rate (successes / episodes - p_e)             after each iteration, begun with ``start``

    ``v_e`` is the variance of a success: where it is 0 all episodes of a group are alike, and comparing them teaches
    nothing. Levels of difficulty are environments with names of their own (``data.names``).

    Args:
        floor: fraction of the tasks that is always assigned by ``data.weights``, so that nothing is forgotten.
        rate: weight of an iteration in the moving average.
        start: success rate of an environment before its first episodes.

    Raises:
        ConfigurationError: a value out of range.

    >>> SuccessRateCurriculum(floor=0.5).shares({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.0})
    {'a': 0.75, 'b': 0.25}
    """

    floor: FractionAboveZero = 0.2
    rate: FractionAboveZero = 0.2
    start: UnitInterval = 0.5

    def shares(self, base: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
        """Return the share of each environment; they sum to 1.

        Args:
            base: shares by ``data.weights``, which sum to 1.
            rates: success rates of the environments.
        """
        pull = {name: share * rates[name] * (1 - rates[name]) for name, share in base.items()}
        total = sum(pull.values())
        if not total:
            return dict(base)
        return {name: self.floor * share + (1 - self.floor) * pull[name] / total for name, share in base.items()}

    def updated(self, rates: Mapping[str, float], outcomes: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Return the success rates after an iteration.

        Args:
            rates: success rates before the iteration.
            outcomes: (successes, episodes) of the environments that were played.

        >>> SuccessRateCurriculum(rate=0.25).updated({"a": 0.5, "b": 0.5}, {"a": (8, 8)})
        {'a': 0.625, 'b': 0.5}
        """
        after = dict(rates)
        for name, (successes, episodes) in outcomes.items():
            if episodes:
                after[name] += self.rate * (successes / episodes - after[name])
        return after


class TaskStream:
    """Endless stream over weighted task sources; position ``n`` always gives the same task.

    Sources take turns so that after any number of tasks each one's count is within 1 of its share. A sized source is
    shuffled in each of its epochs; an endless one is read in order.

    A curriculum has its own shares for each block of positions, an iteration. The target of a source is then the sum
    over the blocks of its share times the block's length. After every block each source's count is within 1 of its
    target: the difference is carried over. Within a block the sources take turns.

    Args:
        sources: task source by environment name.
        weights: share of each source, in the order of ``sources``; one of 0 is left out. None weighs all equally.
        seed: seed of the shuffling.
        curriculum: rule that sets the shares; None keeps them.

    Attributes:
        planned: number of positions whose source is decided.
        rates: success rates by source, if there is a curriculum.

    Raises:
        ConfigurationError: see :func:`positive_weights`.

    >>> from mrlm_pl.environment import DatasetTasks
    >>> a, b = (DatasetTasks(name, "train", [{}, {}]) for name in "ab")
    >>> [TaskStream({"a": a, "b": b}, [3, 1], seed=0)[n].environment for n in range(4)]
    ['a', 'a', 'b', 'a']
    >>> stream = TaskStream({"a": a, "b": b}, None, 0, SuccessRateCurriculum())
    >>> stream.plan(4, {"a": 0.75, "b": 0.25})
    >>> stream.plan(4, {"a": 0.25, "b": 0.75})
    >>> "".join(stream[n].environment for n in range(8))
    'aabababb'
    """

    def __init__(
        self,
        sources: Mapping[str, TaskSource],
        weights: Sequence[float] | None,
        seed: int,
        curriculum: SuccessRateCurriculum | None = None,
    ) -> None:
        positive = positive_weights(list(sources), weights)
        self.sources, self.seed = {name: sources[name] for name in positive}, seed
        self.shares = {name: number / sum(positive.values()) for name, number in positive.items()}
        self.curriculum = curriculum
        self.rates = dict.fromkeys(self.sources, curriculum.start) if curriculum else {}
        self._owed, self._block = dict.fromkeys(self.sources, 0.0), 0
        self._silent: set[str] = set()
        self._orders: dict[tuple[str, int], list[int]] = {}
        self.restart()

    def restart(self) -> None:
        """Plan the sources again from the first position on, with the same result."""
        self._picks: dict[int, tuple[str, int]] = {}
        self._counts = dict.fromkeys(self.sources, 0)
        self.planned = 0

    def __getitem__(self, position: int) -> Task:
        return self.attempt(position, 0, 1)

    def attempt(self, position: int, number: int, attempts: int) -> Task:
        """Return one of the ``attempts`` tasks of a position, all of its source; each is of one position and number.

        The sources keep their shares, whichever of the tasks are used.

        >>> from mrlm_pl.environment import DatasetTasks
        >>> a, b = (DatasetTasks(name, "train", [{}, {}]) for name in "ab")
        >>> stream = TaskStream({"a": a, "b": b}, None, seed=0)
        >>> [stream.attempt(position, number, 2).environment for position in (0, 1) for number in (0, 1)]
        ['a', 'a', 'b', 'b']
        """
        name, count = self.picked(position)
        count = count * attempts + number
        source = self.sources[name]
        if source.size is not None:
            epoch, index = divmod(count, source.size)
            count = self._order(name, epoch, source.size)[index]
        task = source[count]
        return task if task.environment == name else replace(task, environment=name)

    def picked(self, position: int) -> tuple[str, int]:
        """Return the source of a position, not yet forgotten, and the number of earlier positions of that source."""
        while self.curriculum is None and self.planned <= position:
            turn = self.planned + 1
            behind = {name: share * turn - self._counts[name] for name, share in self.shares.items()}
            self._take(max(behind, key=lambda name: behind[name]))
        return self._picks[position]

    def plan_until(self, iteration: int, last: int, groups: int) -> None:
        """Decide the sources of the groups up to an iteration, where they are not decided yet.

        All that may begin are decided here: an asynchronous collector reads them in its own thread, and two
        threads that decide would make the order depend on the time.

        Args:
            iteration: current iteration; the plan of earlier ones is dropped.
            last: last iteration whose groups may begin now.
            groups: number of groups in an iteration.
        """
        first, end = iteration * groups, (last + 1) * groups
        if self.curriculum is None:
            self.picked(end - 1)  # a resumed run decides those before it too
        elif self._block not in (0, groups):
            self.planned = first  # a run may be resumed with other groups
        while self.curriculum is not None and self.planned < end:
            early = self.planned < first  # in a run resumed from a checkpoint without a curriculum
            self.plan(groups, self.shares if early else self.curriculum.shares(self.shares, self.rates))
        self.forget(first)

    def forget(self, before: int) -> None:
        """Drop the positions before this one, which are not read again."""
        # A new mapping would be one that another thread does not see.
        for position in [position for position in self._picks if position < before]:
            del self._picks[position]

    def plan(self, positions: int, shares: Mapping[str, float]) -> None:
        """Decide the next ``positions`` by shares that sum to 1."""
        self._block = positions
        targets = {name: self._owed[name] + shares[name] * positions for name in self.sources}
        counts = apportion(targets, positions)
        self._owed = {name: targets[name] - counts[name] for name in self.sources}
        turns = sorted(
            ((number + 0.5) / count, order, name)
            for order, (name, count) in enumerate(counts.items())
            for number in range(count)
        )
        for _, _, name in turns:
            self._take(name)

    def update(self, outcomes: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Update the success rates of the curriculum after an iteration, and return the numbers to log.

        Args:
            outcomes: (successes, episodes) of each environment that was played, over all ranks; 0 episodes for one that
                does not judge.
        """
        assert self.curriculum is not None
        for name in sorted({name for name, (_, episodes) in outcomes.items() if not episodes} - self._silent):
            self._silent.add(name)
            logger.warning(
                "environment %r does not say whether its tasks are solved, so data.curriculum leaves its success rate "
                "at %g",
                name,
                self.rates[name],
            )
        self.rates = self.curriculum.updated(self.rates, outcomes)
        shares = self.curriculum.shares(self.shares, self.rates)
        return {f"rollout/{name}/success_rate": rate for name, rate in self.rates.items()} | {
            f"rollout/{name}/weight": share for name, share in shares.items()
        }

    def state(self) -> dict[str, Any] | None:
        """Return the state of the curriculum and its plan, as plain values; None without a curriculum."""
        if self.curriculum is None:
            return None
        return {
            "rates": dict(self.rates),
            "planned": self.planned,
            "block": self._block,
            "plan": [[position, *pick] for position, pick in sorted(self._picks.items())],
            "owed": dict(self._owed),
            "counts": dict(self._counts),
        }

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore the value of :meth:`state`.

        Raises:
            ConfigurationError: the state belongs to other sources.
        """
        self.restart()  # the checkpoint may be of an earlier iteration than this data module has reached
        if state is None:
            if self.curriculum is not None:
                logger.warning("the checkpoint has no curriculum and this run has one: it begins with no success known")
        elif self.curriculum is None:
            logger.warning("the checkpoint has a curriculum and this run has none: tasks are drawn by data.weights")
        elif set(state["counts"]) != set(self.sources):
            raise ConfigurationError(
                f"the checkpoint's curriculum is over the environments {sorted(state['counts'])}, and this run has "
                f"{sorted(self.sources)}; resume with the same environments, names and weights of 0"
            )
        else:
            self._picks = {position: (name, count) for position, name, count in state["plan"]}
            self._owed, self._counts, self.rates = dict(state["owed"]), dict(state["counts"]), dict(state["rates"])
            self.planned, self._block = state["planned"], state.get("block", 0)

    def _take(self, name: str) -> None:
        """Decide the source of the next position."""
        self._picks[self.planned] = (name, self._counts[name])
        self._counts[name] += 1
        self.planned += 1

    def _order(self, name: str, epoch: int, size: int) -> list[int]:
        order = self._orders.get((name, epoch))
        if order is None:
            order = list(range(size))
            keyed_random("order", self.seed, name, epoch).shuffle(order)
            self._orders[name, epoch] = order
            # Groups that are played in parallel may belong to two epochs, and the tasks of one group in several.
            for old in [number for of, number in list(self._orders) if of == name and number < epoch - 1]:
                self._orders.pop((name, old), None)
        return order


def positive_weights(names: Sequence[str], weights: Sequence[float] | None) -> dict[str, float]:
    """Return the weights of the environments that are trained on; None weighs all equally.

    Raises:
        ConfigurationError: the weights do not fit the names, one is negative or infinite, or all are 0.

    >>> positive_weights(["a", "b", "c"], [2, 0, 1])
    {'a': 2, 'c': 1}
    """
    numbers = [1.0] * len(names) if weights is None else list(weights)
    wrong = any(isinstance(n, str) or not 0 <= n < math.inf for n in numbers) or not any(numbers)
    if wrong or len(numbers) != len(names):
        raise ConfigurationError(
            f"data.weights is {weights} for the environments {list(names)}; give a list with one finite number "
            "for each, in their order, positive or 0 where an environment is only evaluated, but not all 0"
        )
    return {name: number for name, number in zip(names, numbers, strict=True) if number}


def apportion(targets: Mapping[str, float], seats: int) -> dict[str, int]:
    """Return whole numbers next to the targets, 0 or above, that sum to ``seats``: largest remainders first.

    Args:
        targets: numbers that sum to ``seats``.
        seats: sum of the numbers.

    >>> apportion({"a": 2.5, "b": 1.75, "c": -0.25}, 4)
    {'a': 2, 'b': 2, 'c': 0}
    """
    counts = {name: max(0, math.floor(value)) for name, value in targets.items()}
    while (missing := seats - sum(counts.values())) != 0:
        behind = {name: targets[name] - counts[name] for name in counts}
        if missing > 0:
            counts[max(behind, key=lambda name: behind[name])] += 1
        else:
            counts[min((name for name in counts if counts[name]), key=lambda name: behind[name])] -= 1
    return counts


@dataclass(frozen=True)
class TaskSettings(Settings):
    """Settings of one environment among several; None is the value for all of them.

    Args:
        group_size: number of episodes of each task (decisions of each agent in a state of a turn tree); None is
            ``data.group_size``.
        max_turns: number of decisions after which an episode is truncated, in training and validation; None is
            ``data.max_turns``.
        reward_scale: factor of the rewards in training; see :meth:`RunTasks.with_reward_scale`.

    Raises:
        ConfigurationError: a value out of range.
    """

    group_size: PositiveInt | None = None
    max_turns: PositiveInt | None = None
    reward_scale: PositiveFloat = 1.0


class RunTasks:
    """The environments of a run by name, with their settings and the stream of their tasks.

    Args:
        environments: environments of the run, at least one.
        names: names of the environments; for these and the other arguments see :class:`RolloutDataModule`.
        settings: settings of individual environments (``task_settings``).
        weights, curriculum, seed: weights, curriculum and seed of the task stream.

    Raises:
        ConfigurationError: names or weights do not fit the environments.
    """

    def __init__(
        self,
        environments: Sequence[Environment],
        names: Sequence[str] | None,
        settings: Mapping[str, TaskSettings] | None,
        weights: Sequence[float] | None,
        curriculum: SuccessRateCurriculum | None,
        seed: int,
    ) -> None:
        self.environments = named_environments(environments, names)
        for name in settings or {}:
            one_of(self.environments, "data.task_settings: ", environment=name)
        self.settings = {name: TaskSettings() for name in self.environments} | dict(settings or {})
        # An environment that is only evaluated may have no training split.
        trained = positive_weights(list(self.environments), weights)
        sources = {name: self.environments[name].tasks("train") for name in trained}
        self.stream = TaskStream(sources, list(trained.values()), seed, curriculum)

    def group_sizes(self, size: int) -> dict[str, int]:
        """Return the number of episodes of each task by environment; ``size`` if the environment has no setting."""
        return {name: task_settings.group_size or size for name, task_settings in self.settings.items()}

    def turn_limits(self, limit: int) -> dict[str, int]:
        """Return the maximum number of decisions in an episode by environment; ``limit`` if it has no setting."""
        return {name: task_settings.max_turns or limit for name, task_settings in self.settings.items()}

    def with_reward_scale(self, episodes: Sequence[Episode]) -> list[Episode]:
        """Return the episodes with every reward times the scale of its environment, for training.

        Environments reward in different units. The scale applies to advantages, values and comparisons alone: records,
        files, metrics, evaluations and curricula keep the rewards of the environment, so that runs can be compared.
        Terms that the algorithm adds (``overlong_buffer``, the KL penalty) are not scaled. An advantage that is divided
        by the standard deviation of its group does not depend on the scale.
        """
        return [scaled(episode, self.settings[episode.task.environment].reward_scale) for episode in episodes]


def named_environments(environments: Sequence[Environment], names: Sequence[str] | None) -> dict[str, Environment]:
    """Return the environments by name.

    Args:
        environments: environments to name, at least one.
        names: one name for each; None takes the environments' own names.

    Raises:
        ConfigurationError: the names are not as many as the environments, two share one, or one cannot be part of a
            metric's name.
    """
    for environment in environments:
        check_instance(Environment, environment, "data.environment", "an environment")
    own_names = [environment.name for environment in environments]
    chosen = own_names if names is None else list(names)
    if len(chosen) != len(own_names):
        raise ConfigurationError(
            f"data.names are {chosen} for {len(own_names)} environments ({', '.join(own_names)}); give one for each, "
            "in their order"
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigurationError(f"environments {chosen} share a name; give each one its own with data.names")
    for name in chosen:
        if not name or "/" in name:
            raise ConfigurationError(f"data.names: {name!r} cannot be a name; use letters, digits, '_' and '-'")
    return dict(zip(chosen, environments, strict=True))


def scaled(episode: Episode, scale: float) -> Episode:
    """Return the episode with every reward times ``scale``."""
    if scale == 1.0:
        return episode

    def changed(turn: Turn) -> Turn:
        components = {name: value * scale for name, value in turn.components.items()}
        return replace(turn, reward=turn.reward * scale, components=components)

    return replace(
        episode.with_turns(changed),
        step_rewards=tuple({agent: reward * scale for agent, reward in step.items()} for step in episode.step_rewards),
    )
