"""Proximal policy optimization with a value estimate for every token."""

from __future__ import annotations

from typing import Any

from mrlm_pl.advantages.task_normalization import TaskNormalization
from mrlm_pl.learner.credit.tokens import DiscountUnit, TokenCredit
from mrlm_pl.learner.critics import PolicyCritics
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, UnitInterval


class PPO(PolicyGradient):
    """Proximal policy optimization (arXiv 1707.06347), token by token, with generalized advantages (1506.02438).

    ``V_t`` is the value before token t, ``t + 1`` the agent's next token, possibly in a later turn::

        r_t  = the turn's reward on its last token, minus beta (log pi_old - log pi_ref) if `kl.placement: reward`
        d_t  = r_t + gamma_t V_{t+1} - V_t,      A_t = d_t + gamma_t lambda A_{t+1},      R_t = A_t + V_t
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t)
                         + value_coefficient/2 max((V - R_t)^2, (clip(V, V_t - value_clip, V_t + value_clip) - R_t)^2)
                         - entropy.coefficient H_t  + beta k3_t if `kl.placement: loss` )

    The text of the environment between two turns carries value and advantage through unchanged. Truncated episodes
    bootstrap from the value of their last state, terminated ones do not. If the last observation of a truncated
    episode exceeds the context window, they bootstrap from the state at the end of the window. Advantages are
    whitened over all tokens of a policy on all ranks; returns are not. ``data.passes`` and ``data.minibatches`` set how
    often a rollout is used.

    ``clip_fraction`` is logged for each policy, and once a rollout ``explained_variance`` of the values (1 is perfect,
    0 as good as a constant) and ``return``; the other metrics are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        critics: models that estimate the values, by policy, with their own learning rates; a policy without one has a
            value head on its last hidden state.
        value_learning_rate: learning rate of the value heads; None is their model's.
        value_clip: clipping range of a value around its old estimate; None does not clip.
        value_coefficient: weight of the value loss.
        normalize_values: estimate, clip and train values in units of all observed returns, ``(R - mean) / deviation``.
        gamma: discount factor.
        discount_unit: ``turn`` discounts from turn to turn, ``token`` from token to token.
        lam: GAE's lambda per token; 0 trusts the values, 1 the returns.
        whiten_advantages: subtract their mean and divide by their standard deviation.
        task_normalization: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`; ``none`` leaves the
            advantages, None is ``scale_only`` with several environments.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, a critic for a policy that does not exist, or with another tokenizer.
    """

    kl_placements = ("reward", "loss")
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        critics: dict[str, Policy] | None = None,
        value_learning_rate: NonNegativeFloat | None = None,
        value_clip: PositiveFloat | None = 0.2,
        value_coefficient: NonNegativeFloat = 0.5,
        normalize_values: bool = False,
        gamma: UnitInterval = 1.0,
        discount_unit: DiscountUnit = "turn",
        lam: UnitInterval = 0.95,
        whiten_advantages: bool = True,
        task_normalization: TaskNormalization | None = "none",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, task_normalization=task_normalization, **settings)
        self.unit = TokenCredit(gamma, lam, discount_unit, "policy" if whiten_advantages else None)
        self.critic = PolicyCritics(
            critics or {}, self.learners, value_learning_rate, value_clip, value_coefficient, normalize_values
        )
