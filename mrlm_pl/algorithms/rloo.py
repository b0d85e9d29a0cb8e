"""REINFORCE with the other episodes of the task as the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mrlm_pl.advantages import leave_one_out_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import policy_gradient_loss


class RLOO(PolicyGradient):
    """REINFORCE leave-one-out (arXiv 2402.14740).

    For the G episodes of a task with returns ``r_i``::

        A_i  = r_i - mean of the other G - 1
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1); GRPO with
    ``advantage: leave_one_out`` is the clipped form. What is logged is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    uses_importance_ratio = False

    smallest_group = 2

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        returns = self.group_returns(episodes, sampling)
        advantages = leave_one_out_advantages(returns.reward, returns.comparison)
        return returns.rows(advantages, self.temperatures(sampling))

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}
