"""What the multi-agent policy gradients over turn trees share: the decisions of a collection and their returns."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import decision_returns, group_scaled_advantages
from mrlm_pl.advantages.tree import CrossReduction
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.groups import group_numbers
from mrlm_pl.learner.credit.team import warn_of_constant_sum
from mrlm_pl.learner.credit.tree import Decision, decisions_of, joint_returns, reach_of
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import merged
from mrlm_pl.losses import policy_gradient_loss
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching, JointMode
from mrlm_pl.rollout.turn_tree import TurnTree, turn_trees

Weighting = Literal["reach", "equal"]


def refuse_settings(cls: type, settings: Mapping[str, Any], names: Sequence[str]) -> None:
    """Nothing when none of the settings has one of these names, which the class sets itself.

    Raises:
        ConfigurationError: one has.
    """
    for name in names:
        if name in settings:
            raise ConfigurationError(f"{name} is set by {cls.__name__} itself; leave it out")


class JointPolicyGradient(PolicyGradient):
    """Base of the policy gradients over turn trees; a subclass adds :meth:`advantages`.

    In every state each agent is asked for G decisions (``data.group_size``), which are combined to joint actions; each
    is judged, and leads to a state of the next turn, until the environment ends the episode. The return of a joint
    action is its reward plus ``gamma`` times the mean return of those that follow it, and a decision's return is the
    mean over the joint actions that contain it. Decisions of an agent in the same state are compared with each other:
    the key of a comparison is (group, state, agent). Logged once a collection, by policy: ``comparison_groups``, how
    many of them there were, and ``equal_groups``, how many of these had equal returns throughout.

    A bonus or penalty of a turn (``overlong_buffer``) counts for its own decision alone. There is no ratio and no clip,
    so use a collection once (``data.passes`` and ``data.minibatches`` 1).

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        joint_mode: ``align`` combines the g-th decisions of the agents, ``cross`` each with each: more joint actions
            are judged, and what one agent's decision is worth depends less on the other's.
        cross_reduction: ``mean``, or ``sum`` of the joint actions that contain a decision.
        gamma: discount factor, from turn to turn.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; null never does.
        reward: ``team`` is the mean over the agents, the same for all; ``own`` is what each is paid itself. In a
            game of winners and losers only ``own`` teaches anything.
        weighting: ``reach`` gives a decision the weight of the probability of its state, so that every turn counts
            alike and the sum is the gradient of the expected return; ``equal`` counts every decision alike, so that
            later turns, which have more states, weigh more.
        normalize: divide by the standard deviation of the comparison. It makes the baselines alike.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    uses_importance_ratio = False

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        joint_mode: Literal["align", "cross"] = "align",
        cross_reduction: CrossReduction = "mean",
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        normalize: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        words = (
            ("weighting", weighting, ("reach", "equal")),
            ("joint_mode", joint_mode, ("align", "cross")),
            ("cross_reduction", cross_reduction, ("mean", "sum")),
            ("reward", reward, ("team", "own")),
        )
        for name, word, known in words:
            if word not in known:
                raise ConfigurationError(f"{name} is {word!r}; choose from {', '.join(known)}")
        if not 0 <= gamma <= 1:
            raise ConfigurationError(f"gamma is {gamma}; it must be between 0 and 1")
        self.joint_mode: JointMode = joint_mode
        self.cross_reduction: CrossReduction = cross_reduction
        self.gamma, self.stop_above = gamma, stop_above
        self.reward, self.weighting, self.normalize = reward, weighting, normalize
        self._warned = False
        if self.reduction == "episode_mean":
            raise ConfigurationError(
                "reduction is 'episode_mean', but the decisions of a turn tree are no episodes; use sequence_mean"
            )

    @property
    def turn_tree(self) -> Branching | None:
        return Branching(self.joint_mode, stop_above=self.stop_above)

    @abstractmethod
    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        """Advantages [N] of decisions with these returns [N]; equal labels [N] are compared with each other."""

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        if self.reward == "team" and not self._warned:
            self._warned = warn_of_constant_sum(episodes, "set `model.reward: own`")
        trees = turn_trees(episodes)
        decisions = [item for tree in trees.values() for item in self.valued(tree, self.turn_bonus(sampling))]
        keys: dict[tuple[str, str, str], int] = {}
        numbers = [keys.setdefault((d.group, d.node, d.agent), len(keys)) for d in decisions]
        labels = torch.tensor(numbers, dtype=torch.int64)
        returns = torch.tensor([decision.value for decision in decisions], dtype=torch.float64)
        advantages = self.advantages(returns, labels, decisions) if decisions else returns
        if self.normalize:
            advantages = group_scaled_advantages(advantages, returns, labels)
        if self.weighting == "reach":
            advantages = advantages * self._weights(decisions)
        self._note_comparisons(decisions, labels, returns)
        return self._rows(group_numbers(episodes), decisions, labels, advantages, sampling.temperature or 1.0)

    def valued(self, tree: TurnTree, bonus: Callable[[Turn], float] | None) -> list[Decision]:
        """The decisions of a tree that can be judged, with what they are worth."""
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

    def judge(
        self,
        decisions: Mapping[int, Decision],
        returns: Mapping[tuple[int, ...], float],
        place: int,
        bonus: Mapping[int, float],
    ) -> None:
        """Set the values of an agent's decisions in a state; those that cannot be judged keep NaN.

        Args:
            decisions: by number.
            returns: of the state's joint actions that did not fail.
            place: of the agent in the joint actions.
            bonus: what each decision is paid beside, by number.
        """
        summed = self.joint_mode == "cross" and self.cross_reduction == "sum"
        partners = len(decisions) ** (len(next(iter(returns), ())) - 1) if summed else 1
        if self.joint_mode == "align":
            values = {joint[place]: value for joint, value in returns.items()}
        else:
            values = decision_returns(returns, place, partners if summed else None)
        for number, value in values.items():
            decisions[number].value = value + bonus[number]
            decisions[number].summed = partners

    def _states(self, tree: TurnTree) -> Iterator[tuple[str, list[str], dict[str, dict[tuple[int, ...], float]]]]:
        """Each state with the agents that decide in it, and for each of them the returns of the joint actions."""
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
        decisions = [item for tree in turn_trees(group).values() for item in self.valued(tree, None)]
        keys: dict[tuple[str, str], set[float]] = {}
        for decision in decisions:
            keys.setdefault((decision.node, decision.agent), set()).add(decision.value - decision.baseline)
        return all(len(values) < 2 for values in keys.values())

    def _weights(self, decisions: Sequence[Decision]) -> Tensor:
        """The weight [N] of each decision: the probability of its state, scaled to a mean of 1 over all ranks."""
        reach = torch.tensor([decision.reach for decision in decisions], dtype=torch.float64)
        places = _by_policy(decisions)
        own = {(name, "sum"): float(reach[mine].sum()) for name, mine in places.items()}
        own |= {(name, "count"): float(len(mine)) for name, mine in places.items()}
        totals = merged(self.trainer, own)
        weights = torch.ones(len(decisions), dtype=torch.float64)
        for name, mine in places.items():
            weights[mine] = reach[mine] * (totals[name, "count"] / totals[name, "sum"])
        return weights

    def _note_comparisons(self, decisions: Sequence[Decision], labels: Tensor, returns: Tensor) -> None:
        own: dict[tuple[str, str], float] = {}
        for name, mine in _by_policy(decisions).items():
            values: dict[int, set[float]] = {}
            for place in mine:
                values.setdefault(int(labels[place]), set()).add(float(returns[place]))
            own[name, "comparison_groups"] = float(len(values))
            own[name, "equal_groups"] = float(sum(len(found) == 1 for found in values.values()))
        totals = merged(self.trainer, own)
        for name in self.policies:
            for metric in ("comparison_groups", "equal_groups"):
                self.metrics.rollout[self.metrics.name(metric, name)] = totals.get((name, metric), 0.0)

    def _rows(
        self,
        groups: Mapping[str, int],
        decisions: Sequence[Decision],
        labels: Tensor,
        advantages: Tensor,
        temperature: float,
    ) -> dict[str, PolicyBatch]:
        return {
            policy: collate_rows(
                [decisions[place].row for place in places],
                [groups[decisions[place].group] for place in places],
                [int(labels[place]) for place in places],
                places,
                temperature=temperature,
                advantages=[float(advantages[place]) for place in places],
            )
            for policy, places in _by_policy(decisions).items()
        }

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}


def _by_policy(decisions: Sequence[Decision]) -> dict[str, list[int]]:
    """Return the places of each policy's decisions."""
    places: dict[str, list[int]] = {}
    for place, decision in enumerate(decisions):
        places.setdefault(decision.row.policy, []).append(place)
    return places
