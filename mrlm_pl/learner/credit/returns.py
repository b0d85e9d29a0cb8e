"""Returns of a rollout, and the unit of credit that makes advantages of them.

An algorithm and its unit of credit share the work:

1. The unit, an :class:`EpisodeCredit`, compares agents in episodes, turns or decisions, each in their own class of
   returns (:class:`~mrlm_pl.learner.credit.rules.ComparedReturns`).
2. ``unit.returns(episodes, bonus, greedy)`` reads N returns from the records of a rollout, with a number [N] that is
   equal for those that are compared with each other.
3. ``unit.credit(returns, parts)`` has ``parts.advantage_rule``, that of the algorithm, compute baselines [N] and
   advantages [N].
4. That rule is the algorithm's own, such as GRPO's, unless ``unit.has_rule``: then the algorithm calls the unit's
   ``with_baselines`` and ``advantages``.
5. ``returns.rows(advantages)`` makes a batch of B trajectories of T tokens for each policy, in which the action tokens
   of a trajectory, turn or decision have its advantage, [B, T].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, MutableSet, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeAlias

import torch
from torch import Tensor

from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError, name_and_place, source_line
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.batch import PolicyBatch, ReturnAndBaseline, collate_rows
from mrlm_pl.learner.credit.rules import R, same_numbers
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.rewards import TurnBonus
from mrlm_pl.rollout.branches import BranchRule
from mrlm_pl.rollout.tree_player import Branching
from mrlm_pl.settings import Settings

Batches: TypeAlias = dict[str, PolicyBatch]
"""The rows of a rollout by policy."""


@dataclass(frozen=True)
class Returns:
    """Returns of the agents in the episodes that did not fail: N returns, in the order of the episodes.

    Attributes:
        reward: [N] fp64, returns, with the bonuses of turns.
        bonus: [N] fp64, bonuses of turns alone.
        comparison: [N] int64, equal for the returns of one agent in the episodes of one task group.
        group: [N] int64, index of the task group in the rollout.
        environment: [N] names of the environments.
        agent: [N] names of the agents.
        turns: [N] int64, number of turns that the agent took.
        greedy: [N] fp64, return of the agent in the greedy episode of the group, 0 if it did not act there; NaN without
            a greedy episode.
        episode: [N] records of the episodes.
        baseline: [N] fp64, baselines of the returns; None if the rule has none.
    """

    reward: Tensor
    bonus: Tensor
    comparison: Tensor
    group: Tensor
    environment: tuple[str, ...]
    agent: tuple[str, ...]
    turns: Tensor
    greedy: Tensor
    episode: tuple[Episode, ...]
    baseline: Tensor | None = None

    returns = property(attrgetter("reward"), doc="Returns [N] fp64 that are compared, those of :attr:`reward`.")

    @property
    def roles(self) -> list[str]:
        """Role of each return, ``ENVIRONMENT/AGENT``."""
        return [f"{game}/{agent}" for game, agent in zip(self.environment, self.agent, strict=True)]

    @property
    def policies(self) -> tuple[str, ...]:
        """Policy of each return, empty if the agent did not act."""
        trajectories = (episode.trajectories[agent] for episode, agent in zip(self.episode, self.agent, strict=True))
        return tuple(next((trajectory.policy for trajectory in played), "") for played in trajectories)

    def components(self) -> dict[str, Tensor]:
        """Return the reward components [N] fp64 of each agent in each episode by name, 0 for an absent component."""
        sums: dict[str, Tensor] = {}
        for number, (episode, agent) in enumerate(zip(self.episode, self.agent, strict=True)):
            for turn in (turn for trajectory in episode.trajectories[agent] for turn in trajectory.turns):
                for name, value in turn.components.items():
                    sums.setdefault(name, torch.zeros(len(self.agent), dtype=torch.float64))[number] += value
        return dict(sorted(sums.items()))

    def take(self, numbers: Sequence[int]) -> Returns:
        """Return the returns with these indices, in this order; an index may occur several times."""
        columns: dict[str, Any] = {
            name: column[[*numbers]] if isinstance(column, Tensor) else tuple(column[number] for number in numbers)
            for name, column in vars(self).items()
            if column is not None
        }
        return Returns(**columns)

    def rows(self, advantages: Tensor) -> Batches:
        """Return the trajectories of every policy, each with its advantage on all its action tokens.

        If an agent has several trajectories in an episode (a template rewrites history), all get the same
        advantage.

        Args:
            advantages: [N], one for each return.
        """
        acting = [
            (index, trajectory)
            for index, (episode, agent) in enumerate(zip(self.episode, self.agent, strict=True))
            for trajectory in episode.trajectories[agent]
            if any(trajectory.action_mask)
        ]
        indices = [index for index, _ in acting]
        pairs = paired(self.reward, self.baseline)
        return rows_by_policy(
            [trajectory for _, trajectory in acting],
            self.group[indices].tolist(),
            self.comparison[indices].tolist(),
            labels(id(self.episode[index]) for index in indices),
            advantages=advantages[indices].tolist(),
            baselines=[pairs[index] for index in indices],
        )


def returns_of(episodes: Sequence[Episode], turn_bonus: TurnBonus = None, greedy: Sequence[Episode] = ()) -> Returns:
    """Return the returns of a rollout; failed episodes are left out, and their group shrinks.

    Args:
        episodes: episodes of one rollout.
        turn_bonus: function that returns a bonus for a turn, added to the environment's reward; None adds nothing.
        greedy: one greedy episode for each group, if they are played.
    """
    plays = [(e, agent) for e in episodes if not e.failed for agent in e.trajectories]
    groups = group_numbers(episodes)
    greedy_returns = {
        episode.group: {agent: agent_return(episode, agent, turn_bonus) for agent in episode.trajectories}
        for episode in greedy
        if not episode.failed
    }
    rewards = [agent_return(episode, agent, turn_bonus) for episode, agent in plays]
    bonuses = [total - agent_return(*play) for total, play in zip(rewards, plays, strict=True)]
    return Returns(
        reward=torch.tensor(rewards, dtype=torch.float64),
        bonus=torch.tensor(bonuses, dtype=torch.float64),
        comparison=torch.tensor(labels((e.group, agent) for e, agent in plays)).long(),
        group=torch.tensor([groups[episode.group] for episode, _ in plays]).long(),
        environment=tuple(episode.task.environment for episode, _ in plays),
        agent=tuple(agent for _, agent in plays),
        turns=torch.tensor([sum(len(t.turns) for t in e.trajectories[agent]) for e, agent in plays]).long(),
        greedy=torch.tensor(
            [greedy_returns[e.group].get(agent, 0.0) if e.group in greedy_returns else torch.nan for e, agent in plays],
            dtype=torch.float64,
        ),
        episode=tuple(episode for episode, _ in plays),
    )


@dataclass(frozen=True)
class CreditParts(Generic[R]):
    """The parts of an algorithm with which its unit credits a rollout.

    Attributes:
        metrics: metrics of the algorithm.
        advantage_rule: function of returns that returns them with their baselines, and their advantages [N].
        policies: names of the trained policies, in the same order on all ranks.
        penalty: function that returns the penalty [B, T], or 0, in the token rewards of a policy's rows.
        critic: the algorithm's :class:`~mrlm_pl.learner.critics.Critic`, if it has one.
    """

    metrics: Metrics
    advantage_rule: Callable[[R], tuple[R, Tensor]]
    policies: Sequence[str]
    penalty: Callable[[str, PolicyBatch], Tensor | float]
    critic: Any = None  # no class here, as critics read the rows of `credit.tokens`


@dataclass(frozen=True)
class EpisodeCredit(Settings, Generic[R]):
    """Credit each agent per episode, the default unit. Subclasses credit turns, decisions or contributions."""

    of_decisions: ClassVar[bool] = False
    """True if each of its rows is a single decision."""

    branching: ClassVar[Branching | None] = None
    """Branching of the turn trees that it credits; None for separate episodes."""

    branch_rule: ClassVar[BranchRule | None] = None
    """Rule that adds branch episodes to each group; None adds none. Not with turn trees."""

    compares: ClassVar[bool] = True
    """False if episodes with equal returns train too, as they are not compared with each other."""

    has_rule: ClassVar[bool] = False
    """True if a subclass has :meth:`with_baselines`, :meth:`advantages` or :meth:`credit`, which replace the
    algorithm's rule."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not {"with_baselines", "advantages", "credit"}.isdisjoint(vars(cls)):
            cls.has_rule = True

    def warn(self, episodes: Sequence[Episode], warned: MutableSet[Any]) -> None:
        """Warn once about a rollout whose returns carry no signal.

        Args:
            episodes: episodes of one rollout.
            warned: names of earlier warnings; this adds to them.
        """

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode]) -> R:
        """Return the returns that are compared; see :meth:`mrlm_pl.learner.policy_gradient.PolicyGradient.returns`."""
        return returns_of(episodes, bonus, greedy)  # type: ignore[return-value]  # another R overrides this

    def with_baselines(self, returns: R) -> R:
        """Return the returns with the baselines of the unit's own rule."""
        return returns

    def advantages(self, returns: R) -> Tensor:
        """Return the advantages [N] of returns; by default the returns minus their baselines."""
        return returns.returns - returns.baseline

    def check_compared(self, compared: R, rule: Callable[..., Any]) -> None:
        """Validate that this unit's rule compares the returns and baselines that a user's rule has set.

        Raises:
            ConfigurationError: the unit replaces them.
        """
        used = self.with_baselines(compared)
        if not (same_numbers(compared.returns, used.returns) and same_numbers(compared.baseline, used.baseline)):
            raise ConfigurationError(
                f"{rule.__qualname__} sets returns or baselines that {type(self).__name__} does not compare; return "
                f"super().with_baselines(returns), or override `advantages` as well ({source_line(rule)})"
            )

    def credit(self, returns: R, parts: CreditParts[R]) -> Batches:
        """Return the rows of every policy with their advantages, by default those of the rule; every rank calls this.

        Args:
            returns: value of :meth:`returns`.
            parts: parts of the algorithm.
        """
        return self.rows(parts.metrics, *parts.advantage_rule(returns))

    def rows(self, metrics: Metrics, returns: R, advantages: Tensor) -> Batches:
        """Return the rows of every policy, with their advantages [N]; every rank calls this.

        Args:
            metrics: metrics of the algorithm.
            returns: value of :meth:`returns`.
            advantages: [N], one for each return.
        """
        return returns.rows(advantages)


def acting_rows(episodes: Sequence[Episode]) -> list[tuple[Episode, Trajectory]]:
    """Return the trajectories with sampled tokens, with their episodes; failed episodes are left out."""
    return [(episode, t) for episode in episodes if not episode.failed for t in episode.rows() if t.num_actions]


def rows_by_policy(
    rows: Sequence[Trajectory],
    groups: Sequence[int],
    comparisons: Sequence[int],
    episodes: Sequence[int],
    **credit: Sequence[Any],
) -> Batches:
    """Return the rows of each policy as a batch, the policies in the order in which they appear.

    Args:
        rows: N trajectories.
        groups, comparisons, episodes: [N]; see :func:`~mrlm_pl.learner.batch.collate_rows`.
        credit: ``advantages`` and ``baselines``, each [N].
    """
    columns = {"rows": rows, "groups": groups, "comparisons": comparisons, "episode_ids": episodes, **credit}

    def selected(indices: Sequence[int]) -> dict[str, Any]:
        return {name: [column[index] for index in indices] for name, column in columns.items()}

    indices_by_policy = grouped((row.policy, index) for index, row in enumerate(rows))
    return {policy: collate_rows(**selected(indices)) for policy, indices in indices_by_policy.items()}


def credit_turns(batch: PolicyBatch, credit: Sequence[Sequence[tuple[float | None, float | None, float]]]) -> None:
    """Assign each turn's advantage to its tokens, and its return and baseline to the turn.

    Args:
        batch: batch of B rows.
        credit: [B], return, baseline and advantage of each turn of the row.
    """
    batch.advantages = torch.zeros_like(batch.action_mask, dtype=torch.float32)
    batch.turn_baselines = tuple([turn[:2] for turn in turn_credits] for turn_credits in credit)
    for advantages, trajectory, turn_credits in zip(batch.advantages, batch.trajectories, credit, strict=True):
        for turn, (_, _, advantage) in zip(trajectory.turns, turn_credits, strict=True):
            advantages[turn.start : turn.stop] = advantage


def paired(returns: Tensor, baselines: Tensor | None) -> list[ReturnAndBaseline]:
    """Return the pairs of each return [N] and its baseline [N]."""
    return list(zip(returns.tolist(), [None] * len(returns) if baselines is None else baselines.tolist(), strict=True))


def check_advantages(result: object, expected: int, rule: Callable[..., Any]) -> Tensor:
    """Return the advantages that a rule returned.

    Raises:
        ConfigurationError: the advantages are not a finite number for each of the ``expected`` returns.
    """
    if isinstance(result, Tensor) and result.shape == (expected,) and result.isfinite().all():
        return result
    fault = f"a {type(result).__name__}"
    if isinstance(result, Tensor):
        fault = "a number that is NaN or infinite" if result.shape == (expected,) else f"shape {list(result.shape)}"
    name, place = name_and_place(rule)
    raise ConfigurationError(
        f"{name} returned {fault}; it must return a finite advantage for each of the {expected} returns, a tensor of "
        f"shape [{expected}]{place}"
    )


def labels(keys: Iterable[Hashable]) -> list[int]:
    """Return a number for each key, equal for equal keys, in the order in which they appear.

    >>> labels("abac")
    [0, 1, 0, 2]
    """
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def group_numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    """Return a number for each group, in the order in which the groups appear."""
    groups = [episode.group for episode in episodes]
    return dict(zip(groups, labels(groups), strict=True))


def task_types(groups: Tensor, episodes: Sequence[Episode], names: Sequence[str]) -> Tensor:
    """Return the task type [B] of rows: the index of their episode's environment among the names.

    Args:
        groups: [B] group numbers.
        episodes: episodes of one rollout.
        names: names of the run's environments.
    """
    environments = {episode.group: episode.task.environment for episode in episodes}
    return torch.tensor([names.index(name) for name in environments.values()], device=groups.device)[groups]


def agent_return(episode: Episode, agent: str, turn_bonus: TurnBonus = None) -> float:
    """Return an agent's return in an episode, with ``turn_bonus`` added for each of its turns."""
    reward = episode.rewards()[agent]
    if turn_bonus is None:
        return reward
    return reward + sum(turn_bonus(turn) for trajectory in episode.trajectories[agent] for turn in trajectory.turns)


def equal_returns(group: Sequence[Episode]) -> bool:
    """Return whether every agent's returns are all equal; failures do not count."""
    plays = [(agent, agent_return(e, agent)) for e in group if not e.failed for agent in e.trajectories]
    return all(len({*returns}) == 1 for returns in grouped(plays).values())
