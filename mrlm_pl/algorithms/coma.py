"""Counterfactual credit: each agent's decision against what its own other decisions would have earned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.advantages import counterfactual_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.tree import Decision
from mrlm_pl.learner.tree_policy_gradient import JointPolicyGradient, Weighting, refuse_settings
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.rollout.tree_player import Branching
from mrlm_pl.rollout.turn_tree import turn_trees

logger = logging.getLogger(__name__)


class COMA(JointPolicyGradient):
    """Counterfactual multi-agent policy gradients (arXiv 1705.08926) with sampled decisions in place of a critic.

    The g-th decisions of all agents make a joint action with return ``R_g``. For each agent it is compared with the
    joint actions in which only that agent's decision is replaced by its others, which are judged as well::

        A_g  = R_g - mean over i of R(g, with this agent's decision i)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    With two agents that is G^2 joint actions in every state, with N > 2 agents ``G + N G (G - 1)``.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        gamma, stop_above, reward, weighting: see :class:`~mrlm_pl.learner.tree_policy_gradient.JointPolicyGradient`.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        refuse_settings(type(self), settings, ("joint_mode", "cross_reduction", "normalize"))
        super().__init__(
            policies,
            seats,
            joint_mode="align",
            cross_reduction="mean",
            gamma=gamma,
            stop_above=stop_above,
            reward=reward,
            weighting=weighting,
            normalize=False,
            **settings,
        )
        self._told = False

    @property
    def turn_tree(self) -> Branching | None:
        return Branching("counterfactual", stop_above=self.stop_above)

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        states = [
            [tuple(tree.actions[name].decisions.values()) for name in names]
            for tree in turn_trees(episodes).values()
            for names in tree.children().values()
        ]
        branching = [joints for joints in states if len(joints) > 1]
        if branching and not self._told and not any(map(_has_counterfactual, branching)):
            self._told = True
            logger.warning(
                "no joint action of this rollout differs from another in the decision of one agent alone, so all "
                "advantages are 0; COMA needs the turn trees that it collects itself, or those of `joint_mode: cross`"
            )
        return super().credit(episodes, sampling, greedy)

    def judge(
        self,
        decisions: Mapping[int, Decision],
        returns: Mapping[tuple[int, ...], float],
        place: int,
        bonus: Mapping[int, float],
    ) -> None:
        found = counterfactual_advantages(returns, place, bonus.__getitem__)
        for number, decision in decisions.items():
            aligned = next((joint for joint in found if set(joint) == {number}), None)
            if aligned is not None:
                decision.value = returns[aligned] + bonus[number]
                decision.baseline = decision.value - found[aligned]

    def advantages(self, returns: Tensor, labels: Tensor, decisions: Sequence[Decision]) -> Tensor:
        return returns - torch.tensor([decision.baseline for decision in decisions], dtype=torch.float64)


def _has_counterfactual(joints: Sequence[tuple[int, ...]]) -> bool:
    """Whether two of the joint actions differ in the decision of one agent alone.

    >>> _has_counterfactual([(0, 0), (1, 1)]), _has_counterfactual([(0, 0), (1, 0)])
    (False, True)
    """
    places = range(len(joints[0]))
    return any(len({joint[:place] + joint[place + 1 :] for joint in joints}) < len(joints) for place in places)
