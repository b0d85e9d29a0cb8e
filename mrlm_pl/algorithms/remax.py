"""REINFORCE with the greedy answer to the task as the baseline."""

from __future__ import annotations

from mrlm_pl.learner.policy_gradient import PolicyGradient


class ReMax(PolicyGradient):
    """ReMax (arXiv 2310.10505).

    Each task is played once more with the most probable token at every step; that episode's return is the baseline, and
    it is not trained on::

        A_i  = r_i - r(greedy)
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1). With several
    agents all play greedily in the same episode, and each is compared with its own return there, 0 where it did not
    act. Groups whose greedy episode failed are left out. Logged once a rollout under ``train/``: ``greedy_reward``, the
    mean of the baselines, and ``missing_baselines``, the number of groups left out; the rest is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    uses_greedy_baseline = True
