"""Direct preference optimization on pairs of a chosen and a rejected answer."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import PreferenceLoss, preference_gap, preference_loss, preference_metrics, sequence_logp
from mrlm_pl.policy import Policy


class DPO(Algorithm):
    """Direct preference optimization (arXiv 2305.18290) and its relatives.

    For a pair with the answers ``w`` (chosen) and ``l`` (rejected), summed over their tokens::

        gap  = (log pi(w) - log pi_ref(w)) - (log pi(l) - log pi_ref(l))
        loss = mean over pairs of
            sigmoid   -(1 - e) log sigmoid(z) - e log sigmoid(-z),  z = beta gap - margin,  e = label_smoothing
            hinge     max(0, margin - beta gap)                     (2309.06657)
            ipo       (gap - 1 / (2 beta))^2                        (2310.12036)

    The reference is the policy as it is before the first update; its log-probabilities are computed once for all pairs.
    Use it with ``PreferenceDataModule``. Logged under ``train/``: ``rewards_chosen`` and ``rewards_rejected`` (means of
    ``beta (log pi - log pi_ref)``), ``reward_margin`` (their difference), ``preference_accuracy`` (share of pairs with
    a positive gap), ``grad_norm``; under ``val/`` and ``test/`` ``loss`` and the same means.

    Args:
        policies: the weights; one policy.
        optimization: see :class:`Algorithm`.
        loss: ``sigmoid``, ``hinge`` or ``ipo``.
        beta: strength of the pull to the reference.
        label_smoothing: assumed rate of swapped labels, for ``sigmoid``.
        margin: how far the chosen answer must win; None is 0 for ``sigmoid`` and 1 for ``hinge``.
        reference_free: leave the reference out: ``gap = log pi(w) - log pi(l)``.

    Raises:
        ConfigurationError: there are several policies, or a value is out of range or does not belong to the loss.
    """

    data_module = "PreferenceDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        loss: PreferenceLoss = "sigmoid",
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        margin: float | None = None,
        reference_free: bool = False,
    ) -> None:
        super().__init__(policies, None, optimization)
        if len(self.policies) != 1:
            raise ConfigurationError(f"DPO trains one policy; `policies` has {sorted(self.policies)}")
        self.refuse_dropout()
        self.loss = preference_loss(loss, beta=beta, label_smoothing=label_smoothing, margin=margin)
        self.beta, self.reference_free = beta, reference_free

    def policy_loss(self, name: str, rows: PolicyBatch, batch: Batch) -> Tensor:
        losses, gaps, rewards = self._compare(name, rows)
        self.metrics.add_policy(name, preference_metrics(gaps, rewards), len(losses))
        return losses.sum() / (batch.totals[name].sequences / 2)

    def _compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [P], gaps [P] and implicit rewards [P, 2] (chosen, rejected) of pairs in rows 0 and 1, 2 and 3, ..."""
        pairs = sequence_logp(self.policies[name](**rows.inputs()), rows.action_mask).view(-1, 2)
        if self.reference_free:
            gaps, moved = preference_gap(pairs[:, 0], pairs[:, 1]), pairs
        else:
            assert rows.reference_sums is not None
            references = rows.reference_sums.view(-1, 2)
            gaps = preference_gap(pairs[:, 0], pairs[:, 1], references[:, 0], references[:, 1])
            moved = pairs - references
        return self.loss(gaps), gaps.detach(), self.beta * moved.detach()

    def measure(self, prefix: str, batch: Batch) -> None:
        self.take_part(batch)
        for name, rows in batch.policies.items():
            losses, gaps, rewards = self._compare(name, rows)
            numbers = {"loss": losses.mean(), **preference_metrics(gaps, rewards)}
            self.metrics.add_evaluation(
                prefix, {metric: (float(value), len(losses)) for metric, value in numbers.items()}
            )
