"""How far the current policy is from the old one, from the sampler and from the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.algorithms.metric_log import MetricLog
from mrlm_pl.batch import PolicyBatch
from mrlm_pl.losses import approx_kl, kl_k3, masked_mean, mismatch, ratio_max_deviation


@torch.no_grad()
def note_policies_apart(log: MetricLog, name: str, logp: Tensor, rows: PolicyBatch) -> None:
    """Add ``approx_kl``, ``ratio_deviation``, ``kl`` and ``mismatch_*`` of a policy's rows to an update's metrics.

    Args:
        log: where they are noted.
        name: of the policy.
        logp: [B, T] of the current policy.
        rows: with the log-probabilities of the others.
    """
    mask = rows.action_mask
    learner = logp if rows.proximal_logp is None else rows.proximal_logp
    apart = {f"mismatch_{measure}": value for measure, value in mismatch(learner, rows.behavior_logp, mask).items()}
    largest = {
        "mismatch_max_ratio": apart.pop("mismatch_max_ratio"),
        "ratio_deviation": ratio_max_deviation(logp, rows.old_logp, mask),
    }
    apart["approx_kl"] = approx_kl(logp, rows.old_logp, mask)
    if rows.ref_logp is not None:
        apart["kl"] = masked_mean(kl_k3(logp, rows.ref_logp, mask), mask)
    log.note_policy(name, apart, mask.sum())
    log.note_largest(name, largest)
