"""Group relative policy optimization in which each agent is credited with its Shapley value."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.learner.credit.marginal import Absence, Coalitions
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.replay import Rest


class Shapley(PolicyGradient):
    """Group relative policy optimization with Shapley values (Shapley 1953).

    With the team's return ``R(S)`` when the agents ``S`` decide as in the episode and the others are absent, and the
    coalitions ``S`` without agent i among A agents::

        phi_i = mean over sizes k of mean over S of size k of  R(S with i) - R(S)
        A_i   = (phi_i - m_i) / (s_i + 1e-6)        m_i, s_i over the task's episodes
        loss  = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    The values of an episode sum to ``R(all) - R(none)``. Exact ones take 2^A - 1 replays of an episode at most, for
    teams of up to six agents; ``orders`` samples them. See
    :class:`~mrlm_pl.learner.credit.marginal.Coalitions`. The expected gradient is that of an agent's mean return over
    all coalitions, not of the team's return alone: smaller coalitions count too.

    Args:
        orders: number of sampled orders in which the agents join, each with its reverse; None is exact.
        absent, rest: messages of an absent agent, decisions of the others after its first; see
            :data:`mrlm_pl.learner.credit.marginal.Absence`.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: an unknown name or a value out of range, or in a rollout more than six agents without
            ``orders``.
    """

    smallest_group = 2
    default_loss = "ppo"
    advantage = staticmethod(group_normalized_advantages)

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        orders: int | None = None,
        absent: Absence = "empty",
        rest: Rest = "replay",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = Coalitions("shapley", orders, absent, rest)
