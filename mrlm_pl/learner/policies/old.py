"""The old policy, from which the updates on a rollout start, and the correction for the policy that sampled."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mrlm_pl.engines.base import Engine, Sampling
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.losses import Correction, masked_mean, off_policy_sequence_mask


class OldPolicy:
    """The source of pi_old, learner or sampler, and the correction of the losses for the policy that sampled.

    Args:
        recompute: take the log-probabilities of pi_old from the learner at the time of sampling rather than from the
            sampler; None does so only where they differ, see :meth:`recomputes`.
        correction: correction of the losses for the behavior policy.
        threshold: bound on the mean of ``log mu - log pi`` over a trajectory, above which tokens with a negative
            advantage have no loss; None sets no bound.

    Attributes:
        corrects: True if losses are corrected.
        is_current: True if the only update on the rollout takes pi_old from its own forward pass: no update has moved
            the learner since the time of sampling.

    Raises:
        ConfigurationError: the correction needs pi_old from the learner.
    """

    def __init__(self, recompute: bool | None, correction: Correction, threshold: float | None) -> None:
        self.correction, self.threshold = correction, threshold
        self.recompute = correction.recomputes(recompute)
        self.corrects = correction.kind != "none" or threshold is not None
        self.is_current = False

    def recomputes(self, samplings: Mapping[str, Sampling], precision: str | int, engine: Engine | None) -> bool:
        """Return whether pi_old is the learner's at the time of sampling rather than the sampler's.

        Unless an option says so, it is where their log-probabilities differ beyond rounding in single precision: with
        truncated sampling, in reduced precision, and where the engine of a policy computes in another precision than
        the learner or does not tell.

        Args:
            samplings: sampling settings of the trained policies, by name.
            precision: precision of the trainer.
            engine: engine that sampled; None is the in-process engine, with the learner's precision.
        """
        if self.recompute is not None:
            return self.recompute
        learner = {"32": "float32", "32-true": "float32", "64-true": "float64"}.get(str(precision))
        truncated = any(
            sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0 for sampling in samplings.values()
        )
        if learner is None or truncated:
            return True
        return engine is not None and any(engine.precision(name) not in (None, learner) for name in samplings)

    def corrected(self, losses: Tensor, logp: Tensor, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses [B, T] with the correction, and metrics: means over the action tokens.

        Args:
            losses: [B, T], losses of the tokens.
            logp: [B, T], log-probabilities of the current policy.
            rows: trajectories of these tokens.
        """
        mask, metrics = rows.action_mask, {}
        if self.correction.kind != "none":
            weights = self.correction.weights(rows.old_logp, rows.behavior_logp, mask)
            losses = losses * weights
            metrics["correction_weight"] = masked_mean(weights, mask)
        if self.threshold is not None:
            unmasked = off_policy_sequence_mask(logp, rows.behavior_logp, rows.advantages, mask, self.threshold)
            losses = losses.masked_fill(~unmasked, 0.0)
            metrics["off_policy_masked"] = masked_mean(~unmasked, mask)
        return losses, metrics
