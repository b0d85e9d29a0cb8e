"""Group-in-group policy optimization: turns taken in the same state are compared as well as whole episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mrlm_pl.advantages import TurnBaseline
from mrlm_pl.learner.credit.turns import TurnCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat, UnitInterval


class GiGPO(PolicyGradient):
    """Group-in-group policy optimization (arXiv 2505.10978).

    For the G episodes of a task with returns ``R_i``, and the turns of an agent in the same state with discounted
    returns ``R_t = sum_k gamma^(k - t) r_k``::

        A_t  = (R_i - mean(R)) / std(R) + state_weight (R_t - mean of the state) / std of the state
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) + beta KL_t )

    A state is the text since the agent's last turn, in the episodes of one task. Turns in a state that no other
    episode reached have the first term alone. Unlike the original code, each episode counts once in its group's mean
    and standard deviation, however many turns it has, and the turns of a state are compared with those of *other*
    episodes (``turn_baseline: paper`` includes its own).

    Args:
        gamma: discount factor per turn, within states.
        state_weight: weight of the comparison within states.
        normalize: divide by the standard deviations; False keeps the scale of the rewards.
        turn_baseline: baseline of a turn's return within its state; see :data:`mrlm_pl.advantages.TurnBaseline`.
        state_key: function (its import path or name in a plugin) from a state's text to text that is equal for equal
            states; None takes the text as it is.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
        DataError: a record of the rollout lacks messages, and thus has no states.
    """

    smallest_group = 2
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        gamma: UnitInterval = 0.95,
        state_weight: NonNegativeFloat = 1.0,
        normalize: bool = True,
        turn_baseline: TurnBaseline = "unbiased",
        state_key: Callable[[str], str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TurnCredit(gamma, turn_baseline, normalize, state_weight, state_key)
