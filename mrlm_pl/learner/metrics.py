"""The metrics of a training step and of an evaluation, as means over all micro-batches and ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import each_share
from mrlm_pl.losses import approx_kl, kl_k3, masked_mean, mismatch, ratio_max_deviation

_ON_BAR = ("kl", "nll", "preference_accuracy", "pair_accuracy", "accuracy", "approx_kl")
_ON_EVALUATION_BAR = ("reward", "accuracy", "nll", "preference_accuracy", "pair_accuracy")


class MetricLog(LightningModule):
    """A module with policies that logs metrics of its updates and evaluations.

    The numbers of an update are summed on the device, micro-batch by micro-batch, and leave it in one transfer and one
    gather over the ranks when the update is complete.
    """

    policies: Any

    def __init__(self) -> None:
        super().__init__()
        self._evaluated: dict[str, dict[str, tuple[float, float]]] = {}
        self._counted: dict[str, dict[str, float]] = {}
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._largest: dict[str, Tensor] = {}
        self._shares: dict[str, Tensor] = {}

    def metric_name(self, metric: str, policy: str) -> str:
        """Name under which a policy's number is logged: ``train/METRIC``, with the policy's name if there are several.

        The number of policies, not of rows, decides, so the names do not change during a run. The numbers of a critic
        that learns from rows of its own always carry its name.
        """
        alone = len(self.policies) == 1 and policy in self.policies
        return f"train/{metric}" if alone else f"train/{policy}/{metric}"

    def note_policy(self, name: str, metrics: Mapping[str, Tensor], weight: Tensor | float) -> None:
        """Add a policy's means over part of an update to the metrics of that update.

        Args:
            name: of the policy.
            metrics: means [] by name; not read where the weight is 0.
            weight: what they are means over: action tokens, pairs or answers.
        """
        for metric, mean in metrics.items():
            self.note(self.metric_name(metric, name), mean, weight)

    def note_largest(self, name: str, metrics: Mapping[str, Tensor]) -> None:
        """Add a policy's largest values over part of an update, [] by name, to the metrics of that update."""
        for metric, value in metrics.items():
            key, value = self.metric_name(metric, name), value.detach().float()
            self._largest[key] = torch.fmax(self._largest[key], value) if key in self._largest else value

    def note(self, name: str, mean: Tensor, weight: Tensor | float) -> None:
        """Add a mean [] over part of an update, with its weight, to the metric ``name`` of that update."""
        mean = mean.detach().float()
        weights = torch.as_tensor(weight, dtype=torch.float32, device=mean.device)
        total = torch.where(weights > 0, mean * weights, 0.0)
        if name in self._sums:
            total, weights = self._sums[name][0] + total, self._sums[name][1] + weights
        self._sums[name] = total, weights

    def note_share(self, name: str, share: Tensor) -> None:
        """Add a part [] of an update's metric ``name``, which is the sum of all parts."""
        share = share.detach().float()
        self._shares[name] = self._shares[name] + share if name in self._shares else share

    def take_noted(self) -> dict[str, float]:
        """Return the metrics of an update over all its micro-batches and ranks, and begin the next one.

        Every rank must call this once an update. A rank may lack metrics that others have: it may have no rows of a
        policy. What has weight 0 on all ranks is left out.
        """
        own = self._noted_here()
        self._sums, self._largest, self._shares = {}, {}, {}
        ranks = [own] if self._trainer is None else each_share(self.trainer, own)
        sums: dict[str, tuple[float, float]] = {}
        metrics: dict[str, float] = {}
        for means, largest, parts in ranks:
            for name, (total, weight) in means.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + weight
            for name, value in largest.items():
                if not math.isnan(value):
                    metrics[name] = max(value, metrics.get(name, -math.inf))
            for name, value in parts.items():
                metrics[name] = metrics.get(name, 0.0) + value
        metrics |= {name: total / weight for name, (total, weight) in sums.items() if weight}
        return metrics | _of_means(metrics)

    def _noted_here(self) -> tuple[dict[str, tuple[float, float]], dict[str, float], dict[str, float]]:
        """Return this rank's (total, weight) of each mean, largest values and sums, in one transfer from the device."""
        tensors = [*itertools.chain(*self._sums.values()), *self._largest.values(), *self._shares.values()]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        means = {name: (next(numbers), next(numbers)) for name in self._sums}
        return means, {name: next(numbers) for name in self._largest}, {name: next(numbers) for name in self._shares}

    def _log_noted(self) -> dict[str, float]:
        """Log the metrics of the update that is complete, and return them; every rank must call this."""
        metrics = self.take_noted()
        for name, value in metrics.items():
            prefix, _, metric = name.rpartition("/")
            shown = next((other for other in _ON_BAR if f"{prefix}/{other}" in metrics), None)
            self.log(name, value, prog_bar=metric == shown, batch_size=1)
        return metrics

    def _log_collection(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            short = name.rsplit("/", 1)[-1]
            whole = name.count("/") == 1 and short in ("reward", "entropy", "tokens_per_second")
            on_bar = whole or (name.startswith("rollout/agent/") and name.count("/") == 3 and short == "reward")
            self.log(name, value, prog_bar=on_bar, batch_size=1)

    def note_evaluation(
        self, prefix: str, means: Mapping[str, tuple[float, float]], counts: Mapping[str, float] | None = None
    ) -> None:
        """Add means of a batch, with their weights, to the numbers that are logged at the end of an evaluation loop.

        They are means over all batches of all ranks, whichever of them has something to say about a name; NaN where all
        that is said of it has weight 0.

        Args:
            prefix: of the names.
            means: (mean, weight) by name.
            counts: numbers whose sum is logged, by name.
        """
        sums, counted = self._evaluated.setdefault(prefix, {}), self._counted.setdefault(prefix, {})
        for name, (value, weight) in means.items():
            total, weights = sums.get(name, (0.0, 0.0))
            if math.isfinite(value):
                sums[name] = total + value * weight, weights + weight
            elif not weight:
                sums[name] = total, weights
        for name, count in (counts or {}).items():
            counted[name] = counted.get(name, 0.0) + count

    def on_validation_epoch_end(self) -> None:
        self._log_evaluated("val")

    def on_test_epoch_end(self) -> None:
        self._log_evaluated("test")

    def _log_evaluated(self, prefix: str) -> None:
        """Log the means over all that was evaluated on all ranks; a rank may have had nothing."""
        own = (self._evaluated.pop(prefix, {}), self._counted.pop(prefix, {}))
        both = each_share(self.trainer, own)
        shares, counted = [means for means, _ in both], [counts for _, counts in both]
        for name in sorted({name for share in shares for name in share}):
            found = [share[name] for share in shares if name in share]
            total = sum(weight for _, weight in found)
            mean = sum(value for value, _ in found) / total if total else math.nan
            self.log(f"{prefix}/{name}", mean, prog_bar=name in _ON_EVALUATION_BAR)
        for name in sorted({name for counts in counted for name in counts}):
            self.log(f"{prefix}/{name}", sum(counts.get(name, 0.0) for counts in counted))


def _of_means(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return what is a function of other means, and no mean itself: perplexity and the effective sample size."""
    found = {}
    for name, value in metrics.items():
        prefix, _, metric = name.rpartition("/")
        if metric == "nll":
            found[f"{prefix}/perplexity"] = math.exp(min(value, 700.0))
        elif metric == "mismatch_mean_ratio":
            square = metrics[f"{prefix}/mismatch_chi_square"] + 1.0
            found[f"{prefix}/mismatch_effective_share"] = value**2 / square if square else math.nan
    return found


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
