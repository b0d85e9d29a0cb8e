"""Counterfactual credit: each agent's decision against what its own other decisions would have earned."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.decisions import TreeCredit, Weighting
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import RewardShare
from mrlm_pl.turn_tree import turn_trees

logger = logging.getLogger(__name__)


class COMA(PolicyGradient):
    """Counterfactual multi-agent policy gradients (arXiv 1705.08926) with sampled decisions in place of a critic.

    The g-th decisions of all agents make a joint action with return ``R_g``. For each agent it is compared with the
    joint actions in which only that agent's decision is replaced by its others, which are judged as well::

        A_g  = R_g - mean over i of R(g, with this agent's decision i)
        loss = reduce_t( -A_g log pi(token_t) + beta KL_t )

    With two agents that is G^2 joint actions in every state, with N > 2 agents ``G + N G (G - 1)``.

    Args:
        gamma, reward, weighting: see :class:`~mrlm_pl.learner.credit.decisions.TreeCredit`.
        stop_above: end all paths of a state when the mean reward of its joint actions is above this; null never does.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    smallest_group = 2

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        gamma: float = 1.0,
        stop_above: float | None = None,
        reward: RewardShare = "team",
        weighting: Weighting = "reach",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.tree = TreeCredit(
            gamma=gamma,
            stop_above=stop_above,
            reward=reward,
            weighting=weighting,
            counterfactual=True,
            reduction=self.reduction,
        )
        self._warned = False

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        states = [
            [tuple(tree.actions[name].decisions.values()) for name in names]
            for tree in turn_trees(episodes).values()
            for names in tree.children().values()
        ]
        branching = [joints for joints in states if len(joints) > 1]
        if branching and not self._warned and not any(map(_has_counterfactual, branching)):
            self._warned = True
            logger.warning(
                "no joint action of this rollout differs from another in the decision of one agent alone, so all "
                "advantages are 0; COMA needs the turn trees that it collects itself, or those of `joint_mode: cross`"
            )
        return super().credit(episodes, sampling, greedy)


def _has_counterfactual(joints: Sequence[tuple[int, ...]]) -> bool:
    """Return whether two of the joint actions differ in the decision of one agent alone.

    >>> _has_counterfactual([(0, 0), (1, 1)]), _has_counterfactual([(0, 0), (1, 0)])
    (False, True)
    """
    places = range(len(joints[0]))
    return any(len({joint[:place] + joint[place + 1 :] for joint in joints}) < len(joints) for place in places)
