"""Supervised fine-tuning: behavioural cloning on the action tokens of demonstrations."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.algorithms.base import Algorithm, LearningRateSchedule
from mrlm_pl.batch import Batch, PolicyBatch
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import Reduction, cross_entropy_loss, masked_mean, reduce_tokens
from mrlm_pl.policy import Policy


class SFT(Algorithm):
    """Supervised fine-tuning on demonstrations.

    ::

        loss = reduce_t( -log pi(token_t | tokens before it) )   over action tokens, the end-of-turn token included

    Logged under ``train/``: ``nll`` (nats per action token), ``perplexity``, ``grad_norm``; under ``val/`` the same on
    the validation file.

    Args:
        policies: the weights; one policy.
        schedule, warmup_steps, betas: see :class:`Algorithm`.
        reduction: how token losses become one number; see :data:`mrlm_pl.losses.Reduction`.

    Raises:
        ConfigurationError: there are several policies.
    """

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        schedule: LearningRateSchedule = "constant",
        warmup_steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        reduction: Reduction = "token_mean",
    ) -> None:
        super().__init__(policies, None, schedule, warmup_steps, betas)
        if len(self.policies) != 1:
            raise ConfigurationError(f"SFT trains one policy; `policies` has {sorted(self.policies)}")
        if reduction == "constant_length":
            raise ConfigurationError("SFT has no longest response; use another reduction than 'constant_length'")
        self.reduction = reduction

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        mask = rows.action_mask
        losses = cross_entropy_loss(self.policies[name](**rows.inputs()), mask)
        nll = masked_mean(losses, mask)
        for metric, value in (("nll", nll), ("perplexity", torch.exp(nll))):
            self.log(self.metric_name(metric, name), value, prog_bar=metric == "nll", batch_size=1, sync_dist=True)
        return reduce_tokens(losses, mask, self.reduction, batch.totals[name], episode_tokens=rows.episode_tokens)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_likelihood("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_likelihood("test", batch)

    def _log_likelihood(self, prefix: str, batch: Batch) -> None:
        for name, rows in batch.policies.items():
            logp = self.policies[name](**rows.inputs())
            tokens = int(rows.action_mask.sum())
            nll = masked_mean(-logp, rows.action_mask)
            self.log(f"{prefix}/nll", nll, batch_size=tokens, sync_dist=True, prog_bar=True)
