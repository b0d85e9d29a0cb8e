"""REINFORCE++: discounted, KL-penalized returns, whitened over the whole batch."""

from __future__ import annotations

from typing import Any

from mrlm_pl.learner.credit.tokens import DiscountUnit, TokenCredit
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.settings import UnitInterval


class REINFORCEPlusPlus(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262).

    The return of each token, with the divergence from the reference charged to every token, whitened over all of a
    policy's tokens on all ranks::

        R_t  = sum over s >= t of gamma^(s - t) (r_s - beta (log pi_old - log pi_ref)_s)
        A_t  = (R_t - mean) / std
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) )

    ``pi_old`` is the policy that sampled, as ``recompute_old_logp`` says. A turn's reward is on its last token; text
    of the environment carries the return through.

    ``clip_fraction`` is the fraction of tokens whose gradient the clip removes; the other numbers are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        gamma: discount factor.
        discount_unit: ``token`` discounts from token to token, as in the paper, ``turn`` from turn to turn.
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    kl_placements = ("reward", "loss")
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        gamma: UnitInterval = 1.0,
        discount_unit: DiscountUnit = "token",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, **settings)
        self.unit = TokenCredit(gamma, lam=1.0, discount_unit=discount_unit)
