"""Dr.MAS: group relative policy optimization with each agent's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mrlm_pl.advantages import step_normalized_advantages
from mrlm_pl.algorithms.grpo import GRPO
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.groups import agent_turns
from mrlm_pl.policy import Policy


class DrMAS(GRPO):
    """Dr.MAS (arXiv 2602.08847).

    Mean ``m_k`` and standard deviation ``s_k`` are those over all steps (turns) of agent k in the task's episodes, so
    an episode's return ``r_i`` counts as often as the agent acted in it::

        A_i  = (r_i - m_k) / (s_k + 1e-6)
        loss = reduce_t( -min(rho_t A_i, clip(rho_t, 1 - clip_low, 1 + clip_high) A_i) + beta KL_t )

    GRPO also compares an agent with itself alone, but counts every episode once; the two are alike where an agent
    acts once in every episode. ``zero_variance: exclude`` is the paper's filter: an agent whose returns are all equal
    in a task's episodes does not learn from them, while the task's other agents do. What is logged is described at
    :class:`~mrlm_pl.algorithms.grpo.GRPO`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        clip_low, clip_high, dual_clip: see :class:`~mrlm_pl.algorithms.grpo.GRPO`.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            policies,
            seats,
            advantage="group_normalized",
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            **settings,
        )

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        steps = torch.tensor(agent_turns(episodes), dtype=torch.int64)
        return self.group_credit(
            episodes, sampling, lambda rewards, keys: step_normalized_advantages(rewards, keys, steps)
        )
