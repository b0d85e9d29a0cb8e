"""How the numbers of a step and of an evaluation are logged, whatever each rank has to say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from mrlm_pl.strategies import each_share

_ON_BAR = ("kl", "nll", "preference_accuracy", "pair_accuracy", "accuracy", "approx_kl")
_LARGEST = ("ratio_deviation", "mismatch_max_ratio")
_ON_EVALUATION_BAR = ("reward", "accuracy", "nll", "preference_accuracy", "pair_accuracy")


class MetricLog(LightningModule):
    """A module with policies that logs what it is told under their names, as means over the ranks that tell it."""

    policies: Any

    def __init__(self) -> None:
        super().__init__()
        self._evaluated: dict[str, dict[str, tuple[float, float]]] = {}
        self._counted: dict[str, dict[str, float]] = {}
        self._noted: dict[str, tuple[float, float, bool]] = {}

    def metric_name(self, metric: str, policy: str) -> str:
        """Name under which a policy's number is logged: ``train/METRIC``, with the policy's name if there are several.

        The number of policies, not of rows, decides, so the names do not change during a run. The numbers of a critic
        that learns from rows of its own always carry its name.
        """
        alone = len(self.policies) == 1 and policy in self.policies
        return f"train/{metric}" if alone else f"train/{policy}/{metric}"

    def log_policy(self, name: str, metrics: Mapping[str, Tensor | float]) -> None:
        """Log one policy's numbers of a training step, as means over the ranks that have rows of it.

        Of ``ratio_deviation`` and ``mismatch_max_ratio`` the largest is told. The first of ``kl``, ``nll``,
        ``preference_accuracy``, ``pair_accuracy``, ``accuracy`` and ``approx_kl`` that is there goes on the bar.
        """
        shown = next((metric for metric in _ON_BAR if metric in metrics), None)
        for metric, value in metrics.items():
            self._note(self.metric_name(metric, name), float(value), 1.0, on_bar=metric == shown)

    def _note(self, name: str, value: float, weight: float, on_bar: bool = False) -> None:
        self._noted[name] = (value, weight, on_bar)

    def _log_noted(self) -> None:
        """Log what was noted in this step. Ranks may have noted different things: some have no rows of a policy."""
        own, self._noted = self._noted, {}
        noted = [own]
        if self.trainer.world_size > 1:
            noted = [{} for _ in range(self.trainer.world_size)]
            torch.distributed.all_gather_object(noted, own)
        for name in dict.fromkeys(name for table in noted for name in table):
            found = [table[name] for table in noted if name in table]
            if name.endswith(_LARGEST):
                value = max(value for value, _, _ in found)
            else:
                value = sum(value * weight for value, weight, _ in found) / sum(weight for _, weight, _ in found)
            self.log(name, value, prog_bar=found[0][2], batch_size=1)

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
