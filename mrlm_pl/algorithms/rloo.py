"""REINFORCE with the other episodes of the task as the baseline."""

from __future__ import annotations

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.learner.policy_gradient import PolicyGradient


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (arXiv 2402.14740).

    For the G episodes of a task with returns ``r_i``::

        A_i  = r_i - mean of the other G - 1
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    The paper's loss sums over an answer, ``reduction: sequence_sum``; the default is ``token_mean``.

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1); GRPO with
    ``advantage: leave_one_out`` is the clipped form. The metrics are those of
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    advantage = staticmethod(leave_one_out_advantages)
