"""Decisions in turn trees: their returns, and the rows that are credited with them."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableSet, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import counterfactual_advantages, decision_returns, group_scaled_advantages, tree_returns
from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.episode import Episode, Trajectory, Turn, by_group
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.credit.returns import Batches, EpisodeCredit, group_numbers, labels, paired, rows_by_policy
from mrlm_pl.learner.credit.team import warn_of_constant_sum
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.rewards import RewardShare, TurnBonus
from mrlm_pl.rollout.tree_player import Branching
from mrlm_pl.settings import UnitInterval, between
from mrlm_pl.turn_tree import TurnTree

logger = logging.getLogger(__name__)

JointMode = Literal["align", "cross"]
Weighting = Literal["reach", "equal"]


@dataclass(frozen=True)
class ValuedDecision:
    """One decision of one agent, in all paths of the tree that contain it.

    Attributes:
        group, node: task group and state; with the agent they are the key of a comparison.
        row: trajectory that ends with the decision; only the decision's tokens are actions.
        turn: turn of the decision in that trajectory.
        value: return of the joint actions that contain the decision.
        baseline: baseline of the value, if each decision has its own.
        summed: number of joint actions that the value is the sum over; 1 where it is their mean.
        reach: probability of the decision's state when the joint actions of a state are equally likely.
    """

    group: str
    node: str
    row: Trajectory
    turn: Turn
    value: float
    baseline: float = 0.0
    summed: int = 1
    reach: float = 1.0


@dataclass(frozen=True)
class DecisionReturns:
    """The returns of N decisions.

    Attributes:
        reward: [N] fp64, returns, with the bonuses of turns.
        comparison: [N] int64, equal for decisions of one agent in one state.
        decisions: [N] decisions.
        groups: index of each task group in the rollout.
        greedy: [N] fp64, return of the group's greedy episode from the decision's turn on, 0 if that episode was over,
            multiplied by the number of joint actions that the decision's return sums over; NaN without a greedy
            episode.
        baseline: [N] fp64, baselines of the returns; None if the rule has none.
    """

    reward: Tensor
    comparison: Tensor
    decisions: list[ValuedDecision]
    groups: Mapping[str, int]
    greedy: Tensor
    baseline: Tensor | None = None

    returns = property(attrgetter("reward"), doc="Returns [N] fp64 that are compared, those of :attr:`reward`.")

    @property
    def policies(self) -> tuple[str, ...]:
        """Policy [N] of each decision."""
        return tuple(decision.row.policy for decision in self.decisions)

    def rows(self, advantages: Tensor) -> Batches:
        """Return a row for each decision of every policy, with its advantage [N] on the decision's tokens."""
        return rows_by_policy(
            [decision.row for decision in self.decisions],
            [self.groups[decision.group] for decision in self.decisions],
            self.comparison.tolist(),
            range(len(self.decisions)),
            advantages=advantages.tolist(),
            baselines=paired(self.reward, self.baseline),
        )


@dataclass(frozen=True)
class TreeCredit(EpisodeCredit[DecisionReturns]):
    """Credit of decisions in turn trees.

    In every state each agent is asked for G decisions (``data.group_size``), which are combined to joint actions; each
    is evaluated, and leads to a state of the next turn, until the environment ends the episode. The return of a joint
    action is its reward plus ``gamma`` times the mean return of those that follow it, and a decision's return is the
    mean over the joint actions that contain it. Decisions of an agent in the same state are compared with each other:
    the key of a comparison is (group, state, agent). Logged once a rollout, by policy: ``comparison_groups``, their
    number, and ``equal_groups``, the number of those with equal returns throughout.

    A bonus or penalty of a turn (``overlong_buffer``) counts for its own decision alone.

    Args:
        joint_mode: ``align`` combines the g-th decisions of the agents; ``cross`` evaluates the full product of joint
            actions, with lower variance and G^N evaluations.
        cross_reduction: with ``cross``, a decision's return is the ``mean`` or the ``sum`` over the joint actions that
            contain it.
        gamma: discount factor, from turn to turn.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; None never does.
        reward: ``team`` is the mean over the agents, the same for all; ``own`` is each agent's own. In a game of
            winners and losers only ``own`` carries a signal.
        weighting: ``reach`` gives a decision the weight of the probability of its state, so that every turn counts
            alike and the sum is the gradient of the expected return; ``equal`` counts every decision alike, so that
            later turns, which have more states, weigh more.
        normalize: divide by the standard deviation of the comparison.
        counterfactual: evaluate the aligned joint actions, and for each those in which one agent's decision is replaced
            by another of its own; a decision's baseline is the mean return over the agent's decisions in its place.
        expand: continue with ``all`` joint actions of a state, or with the ``best``.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    of_decisions = True

    joint_mode: JointMode = "align"
    cross_reduction: CrossReduction = "mean"
    gamma: UnitInterval = 1.0
    stop_above: Annotated[float, between(-math.inf, math.inf)] | None = None
    reward: RewardShare = "team"
    weighting: Weighting = "reach"
    normalize: bool = False
    counterfactual: bool = False
    expand: Literal["all", "best"] = "all"

    @property
    def has_rule(self) -> bool:  # type: ignore[override]
        return self.counterfactual  # equal returns may all be better than their baselines

    @property
    def branching(self) -> Branching:  # type: ignore[override]
        return Branching("counterfactual" if self.counterfactual else self.joint_mode, self.expand, self.stop_above)

    def warn(self, episodes: Sequence[Episode], warned: MutableSet[Any]) -> None:
        if self.reward == "team":
            warn_of_constant_sum(episodes, "set `model.reward: own`", warned)
        if self.counterfactual and "alike" not in warned:
            _warn_of_alike(map(TurnTree.of, by_group(episodes).values()), warned)

    def returns(self, episodes: Sequence[Episode], bonus: TurnBonus, greedy: Sequence[Episode] = ()) -> DecisionReturns:
        """Return the returns of a rollout's decisions.

        Args:
            episodes: paths of the trees.
            bonus: function that returns a bonus for a turn, added to the return of its decision; None adds nothing.
            greedy: one greedy episode for each group, if they are played.
        """
        trees = map(TurnTree.of, by_group(episodes).values())
        decisions = [decision for tree in trees for decision in self._value_decisions(tree, bonus)]
        played = {episode.group: episode for episode in greedy if not episode.failed}
        greedy_returns = [self._greedy_return(played.get(decision.group), decision, bonus) for decision in decisions]
        return DecisionReturns(
            torch.tensor([decision.value for decision in decisions], dtype=torch.float64),
            torch.tensor(labels((d.group, d.node, d.turn.agent) for d in decisions), dtype=torch.int64),
            decisions,
            group_numbers(episodes),
            torch.tensor(greedy_returns, dtype=torch.float64),
            torch.tensor([d.baseline for d in decisions], dtype=torch.float64) if self.counterfactual else None,
        )

    def _greedy_return(self, episode: Episode | None, decision: ValuedDecision, bonus: TurnBonus) -> float:
        """Return the greedy episode's return from the decision's turn on, as the decision's return counts."""
        if episode is None:
            return math.nan
        total, agent, depth = 0.0, decision.turn.agent, decision.turn.index
        for rewards in reversed(episode.step_rewards[depth:]):
            team = self.reward == "team"
            reward = math.fsum(rewards.values()) / episode.team_size if team else rewards.get(agent, 0.0)
            total = reward + self.gamma * total
        turns = [turn for row in episode.trajectories.get(agent, ()) for turn in row.turns]
        extra = math.fsum(bonus(turn) for turn in turns if turn.index == depth) if bonus else 0.0
        return decision.summed * total + extra

    def rows(self, metrics: Metrics, returns: DecisionReturns, advantages: Tensor) -> Batches:
        """Return a row for each decision, with its advantage, scaled and weighted; every rank must call this.

        Args:
            metrics: metrics of the algorithm, to which those of the comparisons are added.
            returns: returns of the decisions.
            advantages: [N], advantages of the decisions.
        """
        if self.normalize:
            advantages = group_scaled_advantages(advantages, returns.reward, returns.comparison)
        reach = torch.tensor([decision.reach for decision in returns.decisions], dtype=torch.float64)
        by_policy = grouped((policy, index) for index, policy in enumerate(returns.policies))
        counts: dict[tuple[str, str], float] = {}
        for name, indices in by_policy.items():
            pairs = {(int(returns.comparison[index]), float(returns.reward[index])) for index in indices}
            values = Counter(comparison for comparison, _ in pairs)
            counts[name, "comparison_groups"] = float(len(values))
            counts[name, "equal_groups"] = float(sum(count == 1 for count in values.values()))
            counts |= {(name, "reach"): float(reach[indices].sum()), (name, "decisions"): float(len(indices))}
        totals = sum_over_ranks(metrics.trainer, counts)
        for name in metrics.policies:
            for metric in ("comparison_groups", "equal_groups"):
                metrics.rollout[metrics.name(metric, name)] = totals.get((name, metric), 0.0)
        if self.weighting == "reach":
            weights = torch.ones_like(reach)
            for name, indices in by_policy.items():
                weights[indices] = reach[indices] * (totals[name, "decisions"] / totals[name, "reach"])
            advantages = advantages * weights
        return returns.rows(advantages)

    def _value_decisions(self, tree: TurnTree, bonus: TurnBonus) -> list[ValuedDecision]:
        """Return the decisions of a tree with a value."""
        decisions_by_agent = grouped(
            ((node, agent), (number, *decision)) for (node, agent, number), decision in tree.decisions.items()
        )
        shared = joint_returns(tree, None, self.gamma) if self.reward == "team" else {}
        agents = sorted({agent for _, agent in decisions_by_agent})
        by_agent = {agent: shared or joint_returns(tree, agent, self.gamma) for agent in agents}
        sums = self.joint_mode == "cross" and self.cross_reduction == "sum"
        reach, valued = reach_of(tree), []
        for node, names in tree.children().items():
            deciding = list(tree.actions[names[0]].decisions)
            joints = {name: tuple(tree.actions[name].decisions[agent] for agent in deciding) for name in names}
            for index, agent in enumerate(deciding):
                decisions, joint_values = decisions_by_agent[node, agent], by_agent[agent]
                returns = {joint: joint_values[name] for name, joint in joints.items() if name in joint_values}
                bonuses = {number: bonus(turn) if bonus else 0.0 for number, turn, _ in decisions}
                summed = len(decisions) ** (len(deciding) - 1) if sums else 1
                values = self._values(returns, index, bonuses, summed)
                valued += [
                    ValuedDecision(
                        tree.paths[0].group, node, row_of_turn(row, turn), turn, *values[number], summed, reach[node]
                    )
                    for number, turn, row in decisions
                    if number in values
                ]
        return valued

    def _values(
        self, returns: Mapping[tuple[int, ...], float], index: int, bonuses: Mapping[int, float], summed: int
    ) -> dict[int, tuple[float, float]]:
        """Return the value and baseline of each valued decision of an agent in a state, by index.

        Args:
            returns: returns of the state's joint actions that did not fail.
            index: position of the agent in the joint actions.
            bonuses: bonus of each decision's turn, by the decision's index.
            summed: number of joint actions that a value sums over; 1 for their mean.
        """
        if self.counterfactual:
            advantages = counterfactual_advantages(returns, index, bonuses.__getitem__)
            aligned = {joint[index]: joint for joint in advantages if len(set(joint)) == 1}
            values = {number: returns[joint] + bonuses[number] for number, joint in aligned.items()}
            return {number: (value, value - advantages[aligned[number]]) for number, value in values.items()}
        if self.joint_mode == "align":
            means = {joint[index]: value for joint, value in returns.items()}
        else:
            means = decision_returns(returns, index, summed if self.cross_reduction == "sum" else None)
        return {number: (value + bonuses[number], 0.0) for number, value in means.items()}


def _warn_of_alike(trees: Iterable[TurnTree], warned: MutableSet[Any]) -> None:
    """Log once that counterfactual credit has nothing to compare with."""
    states = [
        [tuple(tree.actions[name].decisions.values()) for name in names]
        for tree in trees
        for names in tree.children().values()
    ]
    branching = [joints for joints in states if len(joints) > 1]
    if branching and not any(map(_has_counterfactual, branching)):
        warned.add("alike")
        logger.warning(
            "no joint action of this rollout differs from another in the decision of one agent alone, so all "
            "advantages are 0; COMA needs the turn trees that it collects itself, or those of `joint_mode: cross`"
        )


def _has_counterfactual(joints: Sequence[tuple[int, ...]]) -> bool:
    """Return whether two of the joint actions differ in the decision of one agent alone.

    >>> _has_counterfactual([(0, 0), (1, 1)]), _has_counterfactual([(0, 0), (1, 0)])
    (False, True)
    """
    agents = range(len(joints[0]))
    return any(len({joint[:agent] + joint[agent + 1 :] for joint in joints}) < len(joints) for agent in agents)


def joint_returns(tree: TurnTree, agent: str | None, gamma: float) -> dict[str, float]:
    """Return the return of each joint action that did not fail, by name.

    A joint action whose continuations all failed has no return either, unless ``gamma`` is 0: its future is unknown.

    Args:
        tree: turn tree of a group.
        agent: agent whose rewards count; None takes the mean over the agents.
        gamma: discount factor, from step to step.
    """
    children = tree.children()
    rewards: dict[str, Mapping[str, float]] = {}
    for name in reversed(list(tree.actions)):  # children come after their parent
        after = children.get(name, []) if gamma else []
        step_rewards = tree.actions[name].rewards
        if step_rewards is not None and (not after or any(key in rewards for key in after)):
            rewards[name] = step_rewards
    names = [name for name in tree.actions if name in rewards]
    indices = {name: index for index, name in enumerate(names)}
    earned = [
        math.fsum(rewards[name].values()) / tree.team_size if agent is None else rewards[name].get(agent, 0.0)
        for name in names
    ]
    parents = [indices.get(tree.actions[name].node, -1) for name in names]
    returns = tree_returns(torch.tensor(earned, dtype=torch.float64), parents, gamma)
    return dict(zip(names, returns.tolist(), strict=True))


def reach_of(tree: TurnTree) -> dict[str, float]:
    """Return the probability of each state when joint actions of a state are equally likely."""
    reach = {action.node: 1.0 for action in tree.actions.values() if action.node not in tree.actions}
    children = tree.children()
    for name, action in tree.actions.items():
        if name in children:
            reach[name] = reach[action.node] / len(children[action.node])
    return reach


def row_of_turn(row: Trajectory, turn: Turn) -> Trajectory:
    """Return the trajectory up to the end of a turn, with no other actions than the turn's."""
    inside = range(turn.start, turn.stop)
    return dataclasses.replace(
        row,
        token_ids=row.token_ids[: turn.stop],
        action_mask=tuple(index in inside for index in range(turn.stop)),
        logprobs=(0.0,) * turn.start + row.logprobs[turn.start : turn.stop],
        turns=(turn,),
    )
