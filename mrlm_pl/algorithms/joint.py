"""What the multi-agent policy gradients over turn trees share: the decisions of a collection and their returns."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages import decision_returns, group_scaled_advantages, tree_returns
from mrlm_pl.advantages.joint import CrossReduction
from mrlm_pl.algorithms.group import group_numbers
from mrlm_pl.algorithms.policy_gradient import PolicyGradient
from mrlm_pl.batch import PolicyBatch, collate_rows
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import policy_gradient_loss
from mrlm_pl.policy import Policy
from mrlm_pl.turn_tree import JointMode, TurnTree

RewardShare = Literal["team", "own"]


@dataclass
class JointAction:
    """One decision of each agent that was due in a state.

    Attributes:
        node: the state.
        depth: how many steps led to it.
        decisions: number of each agent's decision.
        rewards: what the step paid, by agent; None when it failed.
    """

    node: str
    depth: int
    decisions: dict[str, int]
    rewards: Mapping[str, float] | None


@dataclass
class Decision:
    """One decision of one agent, in whatever paths it occurs.

    Attributes:
        group, node, depth, agent, number: the key of a comparison is (group, node, agent).
        row: the token row that ends with it; only its own tokens are actions.
        turn: its turn in that row.
        value: the return of the joint actions that contain it.
        baseline: what that is compared with, where each decision has a baseline of its own.
    """

    group: str
    node: str
    depth: int
    agent: str
    number: int
    row: Trajectory
    turn: Turn
    value: float = math.nan
    baseline: float = 0.0


@dataclass
class Tree:
    """The joint actions and decisions of one group's turn tree; joint actions by the id of the state they lead to."""

    actions: dict[str, JointAction] = field(default_factory=dict)
    decisions: dict[tuple[str, str, int], Decision] = field(default_factory=dict)
    agents: set[str] = field(default_factory=set)

    def add(self, episode: Episode) -> None:
        """Take in a path."""
        self.agents.update(episode.trajectories)
        found: dict[int, dict[str, tuple[Turn, Trajectory]]] = {}
        for row in episode.rows():
            for turn in row.turns:
                found.setdefault(turn.index, {})[turn.agent] = (turn, row)
        steps = sorted(found)
        nodes = [next(iter(found[step].values()))[0].node for step in steps]
        for place, (step, node) in enumerate(zip(steps, nodes, strict=True)):
            leads_to = nodes[place + 1] if place + 1 < len(nodes) else episode.id
            if leads_to in self.actions:
                continue
            numbers = {agent: turn.sample for agent, (turn, _) in found[step].items()}
            paid = episode.step_rewards[step] if step < len(episode.step_rewards) else None
            self.actions[leads_to] = JointAction(node, step, numbers, paid)
            for agent, (turn, row) in found[step].items():
                key = (node, agent, turn.sample)
                if key not in self.decisions:
                    cut = _only(row, turn)
                    self.decisions[key] = Decision(episode.group, node, step, agent, turn.sample, cut, turn)

    def returns(self, agent: str | None, gamma: float) -> dict[str, float]:
        """Return of each joint action that did not fail: of one agent, or, without one, the mean over the agents.

        One whose continuations all failed has none either: what it leads to is unknown.
        """
        followed: dict[str, list[str]] = {}
        for name, action in self.actions.items():
            followed.setdefault(action.node, []).append(name)
        known: dict[str, bool] = {}
        for name in reversed(self.actions):  # a path is taken in from its beginning, so what follows comes later
            after = followed.get(name, [])
            known[name] = self.actions[name].rewards is not None and (not after or any(known[key] for key in after))
        kept = [name for name in self.actions if known[name]]
        places = {name: place for place, name in enumerate(kept)}
        rewards = torch.tensor([self._reward(self.actions[name], agent) for name in kept], dtype=torch.float64)
        parents = [places.get(self.actions[name].node, -1) for name in kept]
        return dict(zip(kept, tree_returns(rewards, parents, gamma).tolist(), strict=True))

    def _reward(self, action: JointAction, agent: str | None) -> float:
        assert action.rewards is not None
        return (
            math.fsum(action.rewards.values()) / len(self.agents) if agent is None else action.rewards.get(agent, 0.0)
        )


def turn_trees(episodes: Sequence[Episode]) -> dict[str, Tree]:
    """The trees behind a collection's paths, by group."""
    trees: dict[str, Tree] = {}
    for episode in episodes:
        trees.setdefault(episode.group, Tree()).add(episode)
    return trees


def _only(row: Trajectory, turn: Turn) -> Trajectory:
    """The row up to the end of a turn, with no other actions than its."""
    inside = range(turn.start, turn.stop)
    return dataclasses.replace(
        row,
        token_ids=row.token_ids[: turn.stop],
        action_mask=tuple(place in inside for place in range(turn.stop)),
        logprobs=(0.0,) * turn.start + row.logprobs[turn.start : turn.stop],
        turns=(turn,),
    )


class JointPolicyGradient(PolicyGradient):
    """Base of the policy gradients over turn trees; a subclass adds :meth:`advantages`.

    In every state each agent is asked for G decisions (``data.group_size``), which are combined to joint actions; each
    is judged, and leads to a state of the next turn, until the environment ends the episode. The return of a joint
    action is its reward plus ``discount`` times the mean return of those that follow it, and a decision's return is the
    mean over the joint actions that contain it. Decisions of an agent in the same state are compared with each other:
    the key of a comparison is (group, state, agent). Logged once a collection, by policy: ``comparison_groups``, how
    many of them there were, and ``equal_groups``, how many of these had equal returns throughout.

    There is no ratio and no clip, so use a collection once (``data.passes`` and ``data.minibatches`` 1).

    Args:
        policies, seats: see :class:`~mrlm_pl.algorithms.base.Algorithm`.
        joint_mode: ``align`` combines the g-th decisions of the agents, ``cross`` each with each: more joint actions
            are judged, and what one agent's decision is worth depends less on the other's.
        cross_reduction: ``mean``, or ``sum`` of the joint actions that contain a decision.
        discount: of what follows, from turn to turn.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; null never does.
        reward: ``team`` is the mean over the agents, the same for all; ``own`` is what each is paid itself.
        normalize: divide by the standard deviation of the comparison. It makes the baselines alike.
        settings: see :class:`~mrlm_pl.algorithms.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        joint_mode: Literal["align", "cross"] = "align",
        cross_reduction: CrossReduction = "mean",
        discount: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        normalize: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        words = (
            ("joint_mode", joint_mode, ("align", "cross")),
            ("cross_reduction", cross_reduction, ("mean", "sum")),
            ("reward", reward, ("team", "own")),
        )
        for name, word, known in words:
            if word not in known:
                raise ConfigurationError(f"{name} is {word!r}; choose from {', '.join(known)}")
        if not 0 <= discount <= 1:
            raise ConfigurationError(f"discount is {discount}; it must be between 0 and 1")
        self.joint_mode: JointMode = joint_mode
        self.cross_reduction: CrossReduction = cross_reduction
        self.discount, self.stop_above = discount, stop_above
        self.reward, self.normalize = reward, normalize

    @property
    def turn_tree(self) -> TurnTree | None:
        return TurnTree(self.joint_mode, stop_above=self.stop_above)

    @abstractmethod
    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        """Advantages [N] of decisions with these returns [N]; equal labels [N] are compared with each other."""

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        trees = turn_trees(episodes)
        decisions = [item for tree in trees.values() for item in self.valued(tree, self.turn_bonus(sampling))]
        keys: dict[tuple[str, str, str], int] = {}
        numbers = [keys.setdefault((d.group, d.node, d.agent), len(keys)) for d in decisions]
        labels = torch.tensor(numbers, dtype=torch.int64)
        returns = torch.tensor([decision.value for decision in decisions], dtype=torch.float64)
        advantages = self.advantages(returns, labels, decisions) if decisions else returns
        if self.normalize:
            advantages = group_scaled_advantages(advantages, returns, labels)
        self._note_comparisons(decisions, labels, returns)
        return self._rows(group_numbers(episodes), decisions, labels, advantages, sampling.temperature or 1.0)

    def valued(self, tree: Tree, bonus: Callable[[Turn], float] | None) -> list[Decision]:
        """The decisions of a tree that can be judged, with their returns."""
        shared = tree.returns(None, self.discount) if self.reward == "team" else {}
        found: dict[tuple[str, str, int], float] = {}
        for agent in sorted(tree.agents):
            returns = shared if self.reward == "team" else tree.returns(agent, self.discount)
            by_node: dict[str, list[tuple[int, float]]] = {}
            for name, value in returns.items():
                action = tree.actions[name]
                if agent in action.decisions:
                    by_node.setdefault(action.node, []).append((action.decisions[agent], value))
            for node, pairs in by_node.items():
                numbers = torch.tensor([number for number, _ in pairs])
                values = torch.tensor([value for _, value in pairs], dtype=torch.float64)
                means = decision_returns(values, numbers, self.cross_reduction).tolist()
                found |= {(node, agent, number): value for number, value in enumerate(means)}
        kept = []
        for key, decision in tree.decisions.items():
            decision.value = found.get(key, math.nan) + (bonus(decision.turn) if bonus else 0.0)
            if not math.isnan(decision.value):
                kept.append(decision)
        return kept

    def _note_comparisons(self, decisions: Sequence[Decision], labels: Tensor, returns: Tensor) -> None:
        for name in self.policies:
            mine = [place for place, item in enumerate(decisions) if item.row.policy == name]
            values: dict[int, set[float]] = {}
            for place in mine:
                values.setdefault(int(labels[place]), set()).add(float(returns[place]))
            own = torch.tensor([len(values), sum(len(found) == 1 for found in values.values())], device=self.device)
            total, equal = self.from_all_ranks(own).sum(0).tolist()
            self._prepared_metrics[self.metric_name("comparison_groups", name)] = float(total)
            self._prepared_metrics[self.metric_name("equal_groups", name)] = float(equal)

    def _rows(
        self,
        groups: Mapping[str, int],
        decisions: Sequence[Decision],
        labels: Tensor,
        advantages: Tensor,
        temperature: float,
    ) -> dict[str, PolicyBatch]:
        tables: dict[str, list[int]] = {}
        for place, decision in enumerate(decisions):
            tables.setdefault(decision.row.policy, []).append(place)
        return {
            policy: collate_rows(
                [decisions[place].row for place in places],
                [groups[decisions[place].group] for place in places],
                [int(labels[place]) for place in places],
                places,
                temperature=temperature,
                advantages=[float(advantages[place]) for place in places],
            )
            for policy, places in tables.items()
        }

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}
