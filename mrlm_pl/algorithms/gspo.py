"""Group sequence policy optimization: the ratio of whole answers instead of tokens."""

from __future__ import annotations

from mrlm_pl.advantages import group_normalized_advantages
from mrlm_pl.learner.policy_gradient import PolicyGradient


class GSPO(PolicyGradient):
    """Group sequence policy optimization (arXiv 2507.18071).

    ``s_i`` is the geometric mean of an answer's token ratios; its gradient flows through each token's own::

        A_i  = (r_i - m) / (s + 1e-6)
        s_i  = exp(mean_t log rho_t)
        loss = reduce_t( -min(s_i A_i, clip(s_i, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    By default ``clip`` is ``{low: 3e-4, high: 4e-4}``, much narrower than a token's range, and the reduction is
    ``sequence_mean``, as the objective is about answers. ``clip_fraction`` is the fraction of tokens whose answer is
    clipped. It is :class:`~mrlm_pl.algorithms.grpo.GRPO` with ``loss: gspo``.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    advantage = staticmethod(group_normalized_advantages)
    default_loss = "gspo"
