"""REINFORCE with the greedy answer to the task as the baseline."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from mrlm_pl.advantages import remax_advantages
from mrlm_pl.engines.base import Sampling
from mrlm_pl.episode import Episode
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.returns import returns_of
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import merged
from mrlm_pl.losses import policy_gradient_loss

logger = logging.getLogger(__name__)


class ReMax(PolicyGradient):
    """ReMax (arXiv 2310.10505).

    Each task is played once more with the most probable token at every step; that episode's return is the baseline, and
    it is not trained on::

        A_i  = r_i - r(greedy)
        loss = reduce_t( -A_i log pi(token_t) + beta KL_t )

    There is no ratio and no clip, so use a rollout once (``data.passes`` and ``data.minibatches`` 1). With several
    agents all play greedily at once, and each is compared with its own return there. Groups whose greedy episode failed
    are left out. Logged once a rollout under ``train/``: ``greedy_reward``, the mean of the baselines, and
    ``missing_baselines``, the number of groups left out; the rest is described at
    :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Args:
        policies, seats: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range.
    """

    uses_importance_ratio = False

    @property
    def uses_greedy_baseline(self) -> bool:
        return True

    def credit(
        self, episodes: Sequence[Episode], sampling: Sampling, greedy: Sequence[Episode]
    ) -> dict[str, PolicyBatch]:
        found = returns_of([episode for episode in greedy if not episode.failed], self.turn_bonus(sampling))
        played = {episode.group for episode in found.episode}
        missing = {episode.group for episode in episodes} - played
        if missing:
            causes = [episode.error for episode in greedy if episode.group in missing]
            logger.warning(
                "%d groups are left out, as their greedy episode failed; the first: %s", len(missing), causes[0]
            )
        self._log_baselines(found.reward.tolist(), len(missing))
        compared = [
            episode if episode.group in played else replace(episode, error="no greedy episode to compare with")
            for episode in episodes
        ]
        returns = self.group_returns(compared, sampling, greedy)
        advantages = remax_advantages(returns.reward, returns.greedy.nan_to_num())
        return returns.rows(advantages, self.temperatures(sampling))

    def _log_baselines(self, returns: Sequence[float], missing: int) -> None:
        """Log the baselines of all ranks."""
        own = {"total": math.fsum(returns), "count": len(returns), "missing": missing}
        totals = merged(self.trainer, own)
        if totals["count"]:
            self.metrics.rollout["train/greedy_reward"] = totals["total"] / totals["count"]
        self.metrics.rollout["train/missing_baselines"] = float(totals["missing"])

    def token_losses(self, logp: Tensor, old_logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        assert rows.advantages is not None
        return policy_gradient_loss(logp, rows.advantages, rows.action_mask), {}
