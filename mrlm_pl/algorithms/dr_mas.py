"""Dr.MAS: group relative policy optimization with each agent's own statistics."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mrlm_pl.advantages import group_means, step_normalized_advantages
from mrlm_pl.learner.credit.returns import Returns
from mrlm_pl.learner.policy_gradient import PolicyGradient


class DrMAS(PolicyGradient):
    """Dr.MAS (arXiv 2602.08847).

    Mean ``m_k`` and standard deviation ``s_k`` are those over all steps (turns) of agent k in the task's episodes, so
    an episode's return ``r_i`` counts as often as the agent acted in it::

        A_i  = (r_i - m_k) / (s_k + 1e-6)
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip.low, 1 + clip.high) A_i) + beta KL_t )

    GRPO also compares an agent with itself alone, but counts every episode once; the two are alike where an agent
    acts once in every episode. ``zero_variance: exclude`` is the paper's filter: an agent whose returns are all equal
    in a task's episodes does not learn from them, while the task's other agents do. The metrics are those of
    :class:`~mrlm_pl.algorithms.grpo.GRPO`.

    Args:
        policies, seats, settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    smallest_group = 2
    default_loss = "ppo"

    def with_baselines(self, returns: Returns) -> Returns:
        return replace(returns, baseline=group_means(returns.reward, returns.comparison, returns.turns))

    def advantages(self, returns: Returns) -> Tensor:
        return step_normalized_advantages(returns.reward, returns.comparison, returns.turns)
