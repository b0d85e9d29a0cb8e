"""Clipped importance weights on a policy gradient: every token keeps its gradient."""

from __future__ import annotations

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.learner.policy_gradient import PolicyGradient


class CISPO(PolicyGradient):
    """Clipped importance-sampling policy optimization (arXiv 2506.13585).

    ::

        A_i  = (r_i - m) / (s + 1e-6)
        loss = reduce_t( -sg(clip(rho_t, 1 - clip.low, 1 + clip.high)) A_i log pi(token_t) + beta KL_t )

    By default ``clip`` is ``{low: 1, high: 4}``, which has no lower bound, as in the paper. It is
    :class:`~mrlm_pl.algorithms.grpo.GRPO` with ``loss: cispo``.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or ``clip.dual``, since ``clip.high`` bounds the weight already.
    """

    smallest_group = 2
    advantage = staticmethod(group_normalized_advantages)
    default_loss = "cispo"
