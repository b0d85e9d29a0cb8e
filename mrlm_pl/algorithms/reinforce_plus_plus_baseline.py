"""REINFORCE++ with the mean of the task's episodes as the baseline."""

from __future__ import annotations

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.learner.policy_gradient import PolicyGradient


class REINFORCEPlusPlusBaseline(PolicyGradient):
    """REINFORCE++-baseline (arXiv 2501.03262).

    The returns of a task's episodes minus their mean ``m``, whitened over all of a policy's tokens on all ranks::

        A_t  = (r_i - m - mean) / std
        loss = reduce_t( -min(rho_t A_t, clip(rho_t, 1 - clip.low, 1 + clip.high) A_t) + beta KL_t )

    ``clip_fraction`` is the fraction of tokens whose gradient the clip removes; the other numbers are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    whiten_advantages = True
    advantage = staticmethod(group_centered_advantages)
    default_loss = "ppo"
