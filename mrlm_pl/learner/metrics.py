"""The metrics of a rollout, of an update and of an evaluation, over all micro-batches and ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.optim import Optimizer

from mrlm_pl.advantages import Moments
from mrlm_pl.errors import ConfigurationError, source_line
from mrlm_pl.grouping import summed, summed_pairs
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.ranks import gather_ranks
from mrlm_pl.learner.token_measures import TokenMeasures
from mrlm_pl.losses import approx_kl, kl_k3, masked_mean, mismatch, ratio_max_deviation
from mrlm_pl.trainer.bounds import batches_in_all, batches_served
from mrlm_pl.trainer.logged_numbers import take_logged

_ON_BAR = ("kl", "nll", "preference_accuracy", "pair_accuracy", "accuracy", "approx_kl")
_LEAST_KL = 1e-6

Outcome: TypeAlias = tuple[str, str, bool | None]
"""Metric of an evaluation, environment, and whether its episodes succeeded; None if they were not judged."""
_Evaluated: TypeAlias = tuple[
    list[tuple[str, tuple[float, float]]], list[tuple[str, float]], list[tuple[Outcome, float]]
]
_ON_EVALUATION_BAR = ("reward", "accuracy", "auc", "nll", "preference_accuracy", "pair_accuracy")


class Metrics:
    """Sums of the measures of an algorithm, until they are logged.

    The numbers of an update are summed on the device, micro-batch by micro-batch, and leave it in one transfer and one
    gather over the ranks when the update is complete.

    Args:
        policies: names of the policies.
        learner: algorithm whose trainer is that of the run; None counts this process alone.

    Attributes:
        policies: names of the policies.
        rollout: numbers of the last rollout, to be logged with its first micro-batch.
        update: numbers of the last complete update.
        unwritten: numbers since the last row that :class:`UpdateRows` wrote.
        shown: extra metrics of the progress bar, by the last part of their names, such as ``capped`` of
            ``train/capped``.
        tokens: token measures of the rollout, while they are recorded.
    """

    def __init__(self, policies: Collection[str], learner: LightningModule | None = None) -> None:
        self.policies, self.learner = tuple(policies), learner
        self.rollout: dict[str, float] = {}
        self.update: dict[str, float] = {}
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._largest: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        self._evaluated: dict[str, _Evaluated] = {}
        self.unwritten: dict[str, float] = {}
        self.shown: set[str] = set()
        self.tokens: TokenMeasures | None = None

    @property
    def trainer(self) -> Any:
        """The trainer of the run; None before there is one."""
        return None if self.learner is None else self.learner._trainer

    def name(self, metric: str, policy: str) -> str:
        """Return the name of a policy's metric: ``train/METRIC``, with the policy's name if there are several.

        The number of policies, not of trajectories, decides, so the names do not change during a run. The metrics of a
        critic with trajectories of its own always carry its name; those of no policy carry none.
        """
        alone = not policy or (len(self.policies) == 1 and policy in self.policies)
        return f"train/{metric}" if alone else f"train/{policy}/{metric}"

    def add(self, name: str, mean: Tensor, weight: Tensor | float) -> None:
        """Add a mean [] over part of an update, with its weight, to the metric ``name`` of that update."""
        mean = mean.detach().float()
        weights = weight.float() if isinstance(weight, Tensor) else torch.full_like(mean, weight)
        total = torch.where(weights > 0, mean * weights, 0.0)
        if name in self._means:
            total, weights = self._means[name][0] + total, self._means[name][1] + weights
        self._means[name] = total, weights

    def add_means(self, policy: str, means: Mapping[str, Tensor], weight: Tensor | float) -> None:
        """Add a policy's means over part of an update to the metrics of that update.

        Args:
            policy: name of the policy.
            means: means [] by metric; not read if the weight is 0.
            weight: number of action tokens, pairs or answers that the means are over.
        """
        for metric, mean in means.items():
            self.add(self.name(metric, policy), mean, weight)

    def add_largest(self, policy: str, values: Mapping[str, Tensor]) -> None:
        """Add a policy's largest values over part of an update, [] by metric, to the metrics of that update."""
        for metric, value in values.items():
            key, value = self.name(metric, policy), value.detach().float()
            self._largest[key] = torch.fmax(self._largest[key], value) if key in self._largest else value

    def add_sum(self, name: str, value: Tensor) -> None:
        """Add a summand [] to the metric ``name`` of an update."""
        value = value.detach().float()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_tokens(self, policy: str, logp: Tensor, rows: PolicyBatch, entropy: Tensor | None = None) -> None:
        """Keep the measures of individual tokens, while a rollout records them; see :class:`TokenMeasures`."""
        if self.tokens is not None:
            self.tokens.add(policy, logp, rows, entropy)

    @torch.no_grad()
    def add_divergences(self, policy: str, logp: Tensor, rows: PolicyBatch, entropy: Tensor | None = None) -> None:
        """Add ``approx_kl``, ``ratio_deviation``, ``kl`` and ``mismatch_*`` of a policy's trajectories to an update.

        Args:
            policy: name of the policy.
            logp: [B, T], log-probabilities of the current policy.
            rows: rows with the log-probabilities of the behavior, old and reference policies.
            entropy: [B, T], entropies of the current policy, if the update computes them.
        """
        self.add_tokens(policy, logp, rows, entropy)
        mask = rows.action_mask
        learner = logp if rows.proximal_logp is None else rows.proximal_logp
        means = {f"mismatch_{measure}": value for measure, value in mismatch(learner, rows.behavior_logp, mask).items()}
        largest = {
            "mismatch_max_ratio": means.pop("mismatch_max_ratio"),
            "ratio_deviation": ratio_max_deviation(logp, rows.old_logp, mask),
        }
        means["approx_kl"] = approx_kl(logp, rows.old_logp, mask)
        if rows.ref_logp is not None:
            means["kl"] = masked_mean(kl_k3(logp, rows.ref_logp, mask), mask)
        self.add_means(policy, means, mask.sum())
        self.add_largest(policy, largest)

    def add_values(self, learner: str, returns: Moments, errors: Moments) -> None:
        """Add the mean return and the explained variance of a critic's values to the metrics of the rollout.

        The explained variance is 1 for perfect values, and 0 for values as good as a constant.
        """
        explained = 1.0 - (errors.std / returns.std) ** 2 if returns.std else 0.0
        self.rollout[self.name("return", learner)] = returns.mean
        self.rollout[self.name("explained_variance", learner)] = explained

    def take_rollout(self) -> dict[str, float]:
        """Return the metrics of the rollout, and reset them.

        Raises:
            ConfigurationError: a metric is not one number, or has the name of one of the update, which replaces it.
        """
        metrics, self.rollout = self.rollout, {}
        owners = {"train/", *(self.name("", policy) for policy in self.policies)}
        for name, value in metrics.items():
            owner, metric = name[: name.rfind("/") + 1], name.rpartition("/")[2]
            if fault := _metric_fault(metric if owner in owners else "", value):
                raise ConfigurationError(f"the metric {name!r} {fault}; give it its own name and one number")
        return metrics

    def take_update(self) -> dict[str, float]:
        """Return the metrics of an update over all its micro-batches and ranks, and begin the next one.

        Every rank must call this once an update. A rank may lack metrics that others have, as it may have no
        trajectories of a policy. Metrics with weight 0 on all ranks are left out.
        """
        sums_here = self.own_update()
        self._means, self._largest, self._sums = {}, {}, {}
        ranks = gather_ranks(self.trainer, sums_here)
        totals = summed_pairs(item for means, _, _ in ranks for item in means.items())
        metrics = summed(item for _, _, sums in ranks for item in sums.items())
        for name, value in (item for _, largest, _ in ranks for item in largest.items()):
            if not math.isnan(value):
                metrics[name] = max(value, metrics.get(name, -math.inf))
        metrics |= {name: total / weight for name, (total, weight) in totals.items() if weight}
        self.update = metrics | _derived_metrics(metrics)
        return self.update

    def log(self, values: Mapping[str, float], on_bar: Callable[[str], bool] = lambda name: False) -> None:
        """Log numbers of an update to callbacks and the progress bar immediately, and to the loggers with its row.

        :class:`UpdateRows` writes the row; numbers that other callbacks log in ``on_train_batch_end`` are in it.

        ``LightningModule.log`` takes 0.4 ms for each number, together a tenth of a small model's step.

        Args:
            values: numbers by name.
            on_bar: function that returns whether the progress bar shows the number of that name.
        """
        row = {name: float(value) for name, value in values.items()}
        self.trainer.callback_metrics.update(_tensors(row))
        bar = self.trainer.progress_bar_metrics
        shown = {name for name in row if name.rpartition("/")[2] in self.shown}
        bar.update({name: value for name, value in row.items() if on_bar(name) or name in bar or name in shown})
        if any(name.startswith("rollout/") for name in row):  # which agents have numbers differs between rollouts
            self.unwritten = {name: self.unwritten[name] for name in self.unwritten if not name.startswith("rollout/")}
        self.unwritten |= row

    def own_update(self) -> tuple[dict[str, tuple[float, float]], dict[str, float], dict[str, float]]:
        """Return (total, weight) of each mean, the largest values and the sums of this rank, in one transfer."""
        tensors = [*itertools.chain(*self._means.values()), *self._largest.values(), *self._sums.values()]
        numbers = iter(torch.stack(tensors).tolist() if tensors else [])
        means = {name: (next(numbers), next(numbers)) for name in self._means}
        return means, {name: next(numbers) for name in self._largest}, {name: next(numbers) for name in self._sums}

    def add_evaluation(
        self,
        prefix: str,
        means: Mapping[str, tuple[float, float]],
        counts: Mapping[str, float] | None = None,
        outcomes: Mapping[Outcome, float] | None = None,
    ) -> None:
        """Add a batch's means, with their weights, to the metrics of an evaluation loop.

        Args:
            prefix: prefix of the names: ``val`` or ``test``.
            means: (mean, weight) by name; a mean with the weight 0 may be NaN.
            counts: numbers whose sum is logged, by name.
            outcomes: numbers of episodes. An episode without a judgement, such as a truncated one, counts as a failure
                in an environment that judges any episode of the loop, and does not count in others.
        """
        pairs, numbers, judged = self._evaluated.setdefault(prefix, ([], [], []))
        pairs += ((name, (value * weight if weight else 0.0, weight)) for name, (value, weight) in means.items())
        numbers += (counts or {}).items()
        judged += (outcomes or {}).items()

    def add_evaluation_means(self, prefix: str, means: Mapping[str, Tensor], weight: float) -> None:
        """Add a batch's means [], all over ``weight`` answers or pairs, to the metrics of an evaluation loop."""
        self.add_evaluation(prefix, {name: (float(mean), weight) for name, mean in means.items()})

    def take_evaluation(self, prefix: str) -> dict[str, float]:
        """Return the means and counts over all batches of all ranks; NaN for a mean with weight 0 everywhere.

        Every rank must call this, also one without batches.
        """
        pairs, numbers, judged = self._evaluated.pop(prefix, ([], [], []))
        ranks = gather_ranks(self.trainer, (summed_pairs(pairs), summed(numbers), summed(judged)))
        outcomes = summed(item for _, _, outcomes_of_rank in ranks for item in outcomes_of_rank.items())
        judging = {environment for _, environment, success in outcomes if success is not None}
        accuracies = [
            (name, (count * bool(success), count))
            for (name, environment, success), count in outcomes.items()
            if environment in judging
        ]
        means = summed_pairs([*(item for pairs_of_rank, _, _ in ranks for item in pairs_of_rank.items()), *accuracies])
        # The accuracy of a batch whose episodes all failed is unknown; the environment of others may never judge.
        unknown = {name: means.get(name.removesuffix("accuracy") + "reward", pair) for name, pair in means.items()}
        means = {name: pair for name, pair in means.items() if pair[1] or not unknown[name][1]}
        counts = summed(item for _, counts_of_rank, _ in ranks for item in counts_of_rank.items())
        values = {name: total / weight if weight else math.nan for name, (total, weight) in sorted(means.items())}
        return {f"{prefix}/{name}": value for name, value in (*values.items(), *sorted(counts.items()))}


class UpdateRows(Callback):
    """Ends updates and evaluations, and writes a row of numbers to the loggers every ``log_every_n_steps`` updates.

    Lightning runs it after all other callbacks but those that save checkpoints: the row of an update is written before
    the checkpoint that lets a resumed run begin after the update.

    Args:
        metrics: metrics of the algorithm.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        metrics.unwritten = {}  # an earlier fit that was interrupted may have left some
        self._updates: int | None = None  # of the run at the last batch, None before the first
        self._written: int | None = None  # at the last row

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the row of an update after which a signal in another callback ended the run."""
        self._updates = self._written = trainer.global_step if self._updates is None else self._updates
        self.on_train_batch_end(trainer)

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write that row before the validation that is due after the update."""
        if trainer.fit_loop.is_resuming and self._updates is not None:
            self.on_train_batch_end(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Let the algorithm check the update and log its metrics."""
        pl_module.end_update(optimizer)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the algorithm log the metrics of the evaluation."""
        pl_module.end_evaluation("val")

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Let the algorithm log the metrics of the evaluation."""
        pl_module.end_evaluation("test")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write the row if the batch was the last one of an update."""
        updated, self._updates = trainer.global_step != self._updates, trainer.global_step
        every, ended = trainer.log_every_n_steps, trainer.should_stop or trainer.fast_dev_run
        due = every and trainer.global_step % every == 0
        if updated and every and (due or ended or batches_served(trainer) >= batches_in_all(trainer)):
            self._write(trainer)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Write the numbers since the last row."""
        if trainer.log_every_n_steps and self._written != self._updates:
            self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"row": self.metrics.unwritten, "updates": self._updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.metrics.unwritten, self._updates = dict(state_dict["row"]), state_dict.get("updates")

    def _write(self, trainer: Any) -> None:
        row, self.metrics.unwritten, self._written = self.metrics.unwritten, {}, trainer.global_step
        row |= take_logged(trainer)
        trainer.logged_metrics.update(_tensors(row))
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, **row}, step=trainer.global_step - 1)
            logger.save()


_LOGGED = {"loss", "approx_kl", "ratio_deviation", "kl", "entropy", "value_loss", "grad_norm", "correction_weight"}
"""Metrics that every algorithm of policy gradients may log, in addition to ``mismatch_*``."""


def check_token_losses(returned: Any, logp: Tensor, rule: Callable[..., Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses and metrics that a rule returned, the metrics as tensors.

    Raises:
        ConfigurationError: the results are not a loss for each token of ``logp``, with a gradient in it, and a mapping
            of single numbers, or a number has the name of another metric of the update, with which it would be
            averaged.
    """
    losses, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if not isinstance(losses, Tensor) or losses.shape != logp.shape or not isinstance(metrics, dict):
        raise ConfigurationError(
            f"{rule.__qualname__} must return a loss for each token, a tensor of shape {list(logp.shape)}, and a dict "
            f"of metrics, which may be empty ({source_line(rule)})"
        )
    if logp.requires_grad and not losses.requires_grad and losses.any():
        raise ConfigurationError(
            f"{rule.__qualname__} returned losses without a gradient in logp, which train nothing; detach the ratio or "
            f"the advantages alone, and compute the losses of logp itself ({source_line(rule)})"
        )
    faults = {name: _metric_fault(name, value) for name, value in metrics.items()}
    for name in filter(faults.get, faults):
        raise ConfigurationError(
            f"{rule.__qualname__}: the metric {name!r} {faults[name]}; give each metric its own name and one "
            f"number, the mean over the action tokens, as by mrlm_pl.losses.masked_mean ({source_line(rule)})"
        )
    return losses, {name: torch.as_tensor(value, device=losses.device) for name, value in metrics.items()}


def _metric_fault(name: str, value: Any) -> str:
    """Return the fault of a rule's metric, or an empty string."""
    if name in _LOGGED or name.startswith("mismatch_"):
        return "has the name of one that is logged already"
    try:
        shape = list(torch.as_tensor(value).shape)
    except (TypeError, ValueError, RuntimeError):
        return f"is {value!r:.60}"
    return f"has shape {shape}" if shape else ""


def _tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return dict(zip(numbers, torch.tensor(list(numbers.values()), dtype=torch.float32), strict=True))


def on_update_bar(name: str, metrics: Mapping[str, float]) -> bool:
    """Return whether the progress bar shows this metric of an update: one of each policy, from when it is not 0.

    One update on each rollout leaves ``approx_kl`` at 0.
    """
    prefix, _, metric = name.rpartition("/")
    chosen = next((metric_name for metric_name in _ON_BAR if f"{prefix}/{metric_name}" in metrics), None)
    return metric == chosen and (metric != "approx_kl" or metrics[name] > _LEAST_KL)


def on_rollout_bar(name: str) -> bool:
    """Return whether the progress bar shows this metric of a rollout."""
    short = name.rsplit("/", 1)[-1]
    of_run = name.count("/") == 1 and short in ("reward", "entropy", "tokens_per_second")
    return of_run or (name.startswith("rollout/agent/") and name.count("/") == 3 and short == "reward")


def on_evaluation_bar(name: str) -> bool:
    """Return whether the progress bar shows this metric of an evaluation."""
    return name.partition("/")[2] in _ON_EVALUATION_BAR


def _derived_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return functions of means that are no means themselves: perplexity and the effective sample size."""
    derived = {}
    for name, value in metrics.items():
        prefix, _, metric = name.rpartition("/")
        if metric == "nll":
            derived[f"{prefix}/perplexity"] = math.exp(min(value, 700.0))
        elif metric == "mismatch_mean_ratio":
            square = metrics[f"{prefix}/mismatch_chi_square"] + 1.0
            derived[f"{prefix}/mismatch_effective_share"] = value**2 / square if square else math.nan
    return derived
