"""Decisions in turn trees: their returns, and the rows that are credited with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from mrlm_pl.advantages import counterfactual_advantages, decision_returns, group_scaled_advantages
from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.groups import group_numbers
from mrlm_pl.learner.credit.team import warn_of_constant_sum
from mrlm_pl.learner.credit.tree import Decision, decisions_of, joint_returns, reach_of
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.learner.ranks import merged
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching
from mrlm_pl.rollout.turn_tree import TurnTree, turn_trees
from mrlm_pl.settings import between, one_of

Weighting = Literal["reach", "equal"]


@dataclass(frozen=True)
class DecisionReturns:
    """The returns of N decisions.

    Attributes:
        reward: [N] fp64, the return, bonuses of turns included.
        comparison: [N] int64, equal for decisions of one agent in one state.
        decisions: [N].
        groups: number of each task group in the rollout.
    """

    reward: Tensor
    comparison: Tensor
    decisions: list[Decision]
    groups: Mapping[str, int]

    @property
    def baseline(self) -> Tensor:
        """[N] fp64, the baseline of each decision, where each has its own."""
        return torch.tensor([decision.baseline for decision in self.decisions], dtype=torch.float64)

    def by_policy(self) -> dict[str, list[int]]:
        """Return the places of each policy's decisions."""
        places: dict[str, list[int]] = {}
        for place, decision in enumerate(self.decisions):
            places.setdefault(decision.row.policy, []).append(place)
        return places

    def rows(self, advantages: Tensor, temperature: Mapping[str, float]) -> dict[str, PolicyBatch]:
        """Return a row for each decision of every policy, with its advantage [N] on the decision's tokens."""
        return {
            policy: collate_rows(
                [self.decisions[place].row for place in places],
                [self.groups[self.decisions[place].group] for place in places],
                self.comparison[places].tolist(),
                places,
                temperature=temperature.get(policy, 1.0),
                advantages=advantages[places].tolist(),
            )
            for policy, places in self.by_policy().items()
        }


Judge = Callable[[Mapping[int, Decision], Mapping[tuple[int, ...], float], int, Mapping[int, float]], None]
"""Sets the values of an agent's decisions in a state; decisions without a value keep NaN.

Its arguments: the decisions by number, the returns of the state's joint actions that did not fail, the agent's place in
the joint actions, and the bonus of each decision by number.
"""


class Learner(Protocol):
    """The parts of an algorithm that log credit."""

    metrics: Metrics
    policies: Any
    trainer: Any


@dataclass
class TreeCredit:
    """Credit of decisions in turn trees.

    In every state each agent is asked for G decisions (``data.group_size``), which are combined to joint actions; each
    is evaluated, and leads to a state of the next turn, until the environment ends the episode. The return of a joint
    action is its reward plus ``gamma`` times the mean return of those that follow it, and a decision's return is the
    mean over the joint actions that contain it. Decisions of an agent in the same state are compared with each other:
    the key of a comparison is (group, state, agent). Logged once a rollout, by policy: ``comparison_groups``, their
    number, and ``equal_groups``, the number of those with equal returns throughout.

    A bonus or penalty of a turn (``overlong_buffer``) counts for its own decision alone.

    Args:
        branching: how the decisions of each state branch.
        gamma: discount factor, from turn to turn.
        reward: ``team`` is the mean over the agents, the same for all; ``own`` is each agent's own. In a game of
            winners and losers only ``own`` carries a signal.
        weighting: ``reach`` gives a decision the weight of the probability of its state, so that every turn counts
            alike and the sum is the gradient of the expected return; ``equal`` counts every decision alike, so that
            later turns, which have more states, weigh more.
        judge: sets the values of decisions.
        normalize: divide by the standard deviation of the comparison.
        reduction: of the algorithm, to be checked.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    branching: Branching
    gamma: float
    reward: RewardShare
    judge: Judge
    weighting: Weighting = "reach"
    normalize: bool = False
    reduction: str = "token_mean"
    _warned: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        one_of(get_args(Weighting), "", weighting=self.weighting)
        one_of(get_args(RewardShare), "", reward=self.reward)
        between(0, 1, "", gamma=self.gamma)
        if self.reduction == "episode_mean":
            raise ConfigurationError(
                "reduction is 'episode_mean', but the decisions of a turn tree are no episodes; use sequence_mean"
            )

    def returns(self, episodes: Sequence[Episode], bonus: Callable[[Turn], float] | None) -> DecisionReturns:
        """Return the returns of a rollout's decisions.

        Args:
            episodes: the paths of the trees.
            bonus: added to a decision's return; None adds nothing.
        """
        if self.reward == "team" and not self._warned:
            self._warned = warn_of_constant_sum(episodes, "set `model.reward: own`")
        decisions = [item for tree in turn_trees(episodes).values() for item in self._valued(tree, bonus)]
        keys: dict[tuple[str, str, str], int] = {}
        labels = [keys.setdefault((d.group, d.node, d.agent), len(keys)) for d in decisions]
        return DecisionReturns(
            torch.tensor([decision.value for decision in decisions], dtype=torch.float64),
            torch.tensor(labels, dtype=torch.int64),
            decisions,
            group_numbers(episodes),
        )

    def rows(
        self, learner: Learner, returns: DecisionReturns, advantages: Tensor, temperature: Mapping[str, float]
    ) -> dict[str, PolicyBatch]:
        """Return a row for each decision, with its advantage, scaled and weighted; every rank must call this.

        Args:
            learner: the algorithm, in whose metrics the comparisons are logged.
            returns: of the decisions.
            advantages: [N].
            temperature: of the sampling, by policy.
        """
        if self.normalize:
            advantages = group_scaled_advantages(advantages, returns.reward, returns.comparison)
        reach = torch.tensor([decision.reach for decision in returns.decisions], dtype=torch.float64)
        own: dict[tuple[str, str], float] = {}
        for name, mine in returns.by_policy().items():
            values: dict[int, set[float]] = {}
            for place in mine:
                values.setdefault(int(returns.comparison[place]), set()).add(float(returns.reward[place]))
            own[name, "comparison_groups"] = float(len(values))
            own[name, "equal_groups"] = float(sum(len(found) == 1 for found in values.values()))
            own |= {(name, "reach"): float(reach[mine].sum()), (name, "decisions"): float(len(mine))}
        totals = merged(learner.trainer, own)
        for name in learner.policies:
            for metric in ("comparison_groups", "equal_groups"):
                learner.metrics.rollout[learner.metrics.name(metric, name)] = totals.get((name, metric), 0.0)
        if self.weighting == "reach":
            weights = torch.ones_like(reach)
            for name, mine in returns.by_policy().items():
                weights[mine] = reach[mine] * (totals[name, "decisions"] / totals[name, "reach"])
            advantages = advantages * weights
        return returns.rows(advantages, temperature)

    def _valued(self, tree: TurnTree, bonus: Callable[[Turn], float] | None) -> list[Decision]:
        """Return the decisions of a tree with a value."""
        reach, made = reach_of(tree), dict[tuple[str, str], dict[int, Decision]]()
        for decision in decisions_of(tree):
            made.setdefault((decision.node, decision.agent), {})[decision.number] = decision
        kept = []
        for node, agents, returns in self._states(tree):
            for place, agent in enumerate(agents):
                decisions = made[node, agent]
                extra = {number: bonus(decision.turn) if bonus else 0.0 for number, decision in decisions.items()}
                self.judge(decisions, returns[agent], place, extra)
                for decision in decisions.values():
                    decision.reach = reach[node]
                    if not math.isnan(decision.value):
                        kept.append(decision)
        return kept

    def _states(self, tree: TurnTree) -> Iterator[tuple[str, list[str], dict[str, dict[tuple[int, ...], float]]]]:
        """Yield each state with the agents that decide in it, and for each of them the returns of the joint actions."""
        agents = sorted({agent for action in tree.actions.values() for agent in action.decisions})
        shared = joint_returns(tree, None, self.gamma) if self.reward == "team" else {}
        by_agent = {agent: shared or joint_returns(tree, agent, self.gamma) for agent in agents}
        for node, names in tree.children().items():
            deciding = list(tree.actions[names[0]].decisions)
            yield (
                node,
                deciding,
                {
                    agent: {
                        tuple(tree.actions[name].decisions[other] for other in deciding): by_agent[agent][name]
                        for name in names
                        if name in by_agent[agent]
                    }
                    for agent in deciding
                },
            )

    def without_signal(self, group: Sequence[Episode]) -> bool:
        """Return whether the decisions in each state are all worth the same; see :meth:`Algorithm.without_signal`."""
        decisions = [item for tree in turn_trees(group).values() for item in self._valued(tree, None)]
        keys: dict[tuple[str, str], set[float]] = {}
        for decision in decisions:
            keys.setdefault((decision.node, decision.agent), set()).add(decision.value - decision.baseline)
        return all(len(values) < 2 for values in keys.values())


def joint_mode_judge(joint_mode: Literal["align", "cross"], cross_reduction: CrossReduction = "mean") -> Judge:
    """Return the judge whose value of a decision is the mean or sum of the returns of its joint actions.

    Args:
        joint_mode: ``align`` combines the g-th decisions of the agents; ``cross`` evaluates the full product of joint
            actions: lower variance, G^N evaluations.
        cross_reduction: ``mean``, or ``sum`` of the joint actions that contain a decision.

    Raises:
        ConfigurationError: an unknown name.
    """
    one_of(("align", "cross"), "", joint_mode=joint_mode)
    one_of(get_args(CrossReduction), "", cross_reduction=cross_reduction)

    def judge(
        decisions: Mapping[int, Decision],
        returns: Mapping[tuple[int, ...], float],
        place: int,
        bonus: Mapping[int, float],
    ) -> None:
        summed = joint_mode == "cross" and cross_reduction == "sum"
        partners = len(decisions) ** (len(next(iter(returns), ())) - 1) if summed else 1
        if joint_mode == "align":
            values = {joint[place]: value for joint, value in returns.items()}
        else:
            values = decision_returns(returns, place, partners if summed else None)
        for number, value in values.items():
            decisions[number].value = value + bonus[number]
            decisions[number].summed = partners

    return judge


def counterfactual_judge(
    decisions: Mapping[int, Decision],
    returns: Mapping[tuple[int, ...], float],
    place: int,
    bonus: Mapping[int, float],
) -> None:
    """Set the value and baseline of each decision: the mean return with the agent's other decisions in its place."""
    found = counterfactual_advantages(returns, place, bonus.__getitem__)
    for number, decision in decisions.items():
        aligned = next((joint for joint in found if set(joint) == {number}), None)
        if aligned is not None:
            decision.value = returns[aligned] + bonus[number]
            decision.baseline = decision.value - found[aligned]
