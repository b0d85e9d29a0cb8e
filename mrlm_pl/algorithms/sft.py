"""Supervised fine-tuning: on the actions of demonstrations, on the environment's answers, or on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.episode import Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch, not_none
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import Reduction, cross_entropy_loss, masked_mean, reduce_tokens
from mrlm_pl.policy import Policy

Objective = Literal["behavioral_cloning", "world_model", "combined"]
_WEIGHTS: dict[str, tuple[float, float]] = {
    "behavioral_cloning": (1.0, 0.0),
    "world_model": (0.0, 1.0),
    "combined": (0.5, 0.5),
}


class _Part(NamedTuple):
    """The tokens of one term of the loss."""

    weight: float
    mask: Tensor
    """[B, T] bool, True for the tokens of the term."""

    totals: str
    """Key of the term's size in the totals of a batch."""


class SFT(Algorithm):
    """Supervised fine-tuning on demonstrations.

    ::

        bc   = reduce_t( -log pi(token_t | tokens before it) )   over action tokens, the end-of-turn token included
        wm   = the same over the tokens with which the environment answers an action
        loss = bc (behavioral_cloning), wm (world_model) or 0.5 bc + 0.5 wm (combined)

    Logged under ``train/``: ``nll`` (nats per action token), ``perplexity``, ``grad_norm``, and ``observation_nll``
    (nats per observation token) where the objective has them; under ``val/`` and ``test/`` ``nll`` and
    ``observation_nll`` on those files.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`Algorithm`.
        objective: train the actions (``behavioral_cloning``), the environment's answers (``world_model``) or half of
            each (``combined``).
        reduction: reduction of the token losses to one number; see :data:`mrlm_pl.losses.Reduction`.

    Raises:
        ConfigurationError: there are several policies, or an unknown name.
    """

    data_module = "TrajectoryDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        objective: Objective = "behavioral_cloning",
        reduction: Reduction = "token_mean",
    ) -> None:
        super().__init__(policies, None, optimization)
        self.check_single_policy()
        if reduction == "constant_length":
            raise ConfigurationError("SFT has no longest response; use another reduction than 'constant_length'")
        self.objective, self.reduction = objective, reduction
        self.action_weight, self.observation_weight = _WEIGHTS[objective]

    def check_demonstrations(self, rows: Mapping[str, Sequence[Trajectory]]) -> None:
        if not self.observation_weight:
            return
        for split, table in rows.items():
            # Tokens after the first action that are no actions are answers of the environment.
            if not any(False in row.action_mask[row.action_mask.index(True) :] for row in table):
                raise DataError(
                    f"objective {self.objective!r} learns from what follows an action, but no row of the {split} data "
                    "continues after one; give it conversations of several turns, or use behavioral_cloning"
                )

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        logp, parts = self._likelihoods(name, rows)
        loss = torch.zeros((), dtype=torch.float32, device=logp.device)
        for metric, (weight, mask, key) in parts.items():
            self.metrics.add_means(name, {metric: masked_mean(-logp, mask)}, mask.sum())
            if weight and (totals := batch.totals[key]).tokens:
                losses, lengths = cross_entropy_loss(logp, mask), mask.sum(-1)
                loss = loss + weight * reduce_tokens(losses, mask, self.reduction, totals, episode_tokens=lengths)
        return loss if loss.requires_grad else loss + 0.0 * logp.sum()

    def _likelihoods(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, _Part]]:
        """Return the log-probabilities [B, T] of the trained tokens, and the terms of the loss by their metric."""
        parts = {"nll": _Part(self.action_weight, rows.action_mask, name)}
        counted = rows.layout.action_mask
        if self.observation_weight:
            observed = not_none(rows.observation_mask)
            parts["observation_nll"] = _Part(self.observation_weight, observed, f"{name}/observations")
            counted = counted | not_none(rows.layout.observation_mask)
        return self.policies[name](rows.inputs()._replace(action_mask=counted), dropout_key=self.global_step), parts

    def measure(self, prefix: str, batch: Batch) -> None:
        for name, rows in self.measured_rows(batch):
            logp, parts = self._likelihoods(name, rows)
            means = {
                metric: (float(masked_mean(-logp, part.mask)), float(part.mask.sum()))
                for metric, part in parts.items()
                if part.mask.any()
            }
            self.metrics.add_evaluation(prefix, means)
