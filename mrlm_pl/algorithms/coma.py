"""Counterfactual credit: each agent's decision against what its own other decisions would have earned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.algorithms.joint import Decision, JointPolicyGradient, RewardShare, Tree
from mrlm_pl.episode import Turn
from mrlm_pl.policy import Policy
from mrlm_pl.turn_tree import TurnTree


class COMA(JointPolicyGradient):
    """Counterfactual multi-agent policy gradients (arXiv 1705.08926) with sampled decisions in place of a critic.

    The g-th decisions of all agents make a joint action with return ``R_g``. For each agent it is compared with the
    joint actions in which only that agent's decision is replaced by its others, which are judged as well::

        A_g  = R_g - mean over i of R(g, with this agent's decision i)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    With two agents that is G^2 joint actions in every state, with N > 2 agents ``G + N G (G - 1)``.

    Args:
        policies, seats: see :class:`~mrlm_pl.algorithms.base.Algorithm`.
        discount, stop_above, reward: see :class:`~mrlm_pl.algorithms.joint.JointPolicyGradient`.
        settings: see :class:`~mrlm_pl.algorithms.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        discount: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        **settings: Any,
    ) -> None:
        super().__init__(
            policies,
            seats,
            joint_mode="align",
            cross_reduction="mean",
            discount=discount,
            stop_above=stop_above,
            reward=reward,
            normalize=False,
            **settings,
        )

    @property
    def turn_tree(self) -> TurnTree | None:
        return TurnTree("counterfactual", stop_above=self.stop_above)

    def valued(self, tree: Tree, bonus: Callable[[Turn], float] | None) -> list[Decision]:
        shared = tree.returns(None, self.discount) if self.reward == "team" else {}
        tables: dict[str | None, dict[str, dict[tuple[int, ...], float]]] = {}
        for agent in [None] if self.reward == "team" else sorted(tree.agents):
            returns = shared if agent is None else tree.returns(agent, self.discount)
            by_node = tables.setdefault(agent, {})
            for name, value in returns.items():
                action = tree.actions[name]
                by_node.setdefault(action.node, {})[tuple(action.decisions.values())] = value
        order = {action.node: list(action.decisions) for action in tree.actions.values()}
        kept = []
        for decision in tree.decisions.values():
            agents = order[decision.node]
            table = tables[None if self.reward == "team" else decision.agent].get(decision.node, {})
            joint = (decision.number,) * len(agents)
            if joint not in table:
                continue  # it failed
            place = agents.index(decision.agent)
            alike = [
                value
                for other, value in table.items()
                if other[:place] == joint[:place] and other[place + 1 :] == joint[place + 1 :]
            ]
            decision.value = table[joint] + (bonus(decision.turn) if bonus else 0.0)
            decision.baseline = math.fsum(alike) / len(alike)
            kept.append(decision)
        return kept

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return returns - torch.tensor([decision.baseline for decision in decisions], dtype=torch.float64)
