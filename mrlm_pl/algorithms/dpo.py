"""Direct preference optimization on pairs of a chosen and a rejected answer."""

from __future__ import annotations

import torch
from torch import Tensor

from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import PreferenceLoss, preference_gap, preference_loss, preference_metrics
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat


class DPO(GivenAnswersAlgorithm):
    """Direct preference optimization (arXiv 2305.18290) and its relatives.

    For a pair with the answers ``w`` (chosen) and ``l`` (rejected), summed over their tokens::

        gap  = (log pi(w) - log pi_ref(w)) - (log pi(l) - log pi_ref(l))
        loss = mean over pairs of
            sigmoid   -(1 - e) log sigmoid(z) - e log sigmoid(-z),  z = beta gap - margin,  e = label_smoothing
            hinge     max(0, margin - beta gap)                     (2309.06657)
            ipo       (gap - 1 / (2 beta))^2                        (2310.12036)
            robust    (-(1 - e) log sigmoid(z) + e log sigmoid(-z)) / (1 - 2 e),  z = beta gap  (2403.00409)
            exo_pair  q log(q / (1 - e)) + (1 - q) log((1 - q) / e),  q = sigmoid(beta gap)     (2402.00856)
            - sft_weight m(w)                                       (2404.19733), m: mean of log pi over the tokens

    The reference is the policy as it is before the first update; its log-probabilities are computed once for all pairs.
    Use it with ``PreferenceDataModule``. Logged under ``train/``: ``rewards_chosen`` and ``rewards_rejected`` (means of
    ``beta (log pi - log pi_ref)``), ``reward_margin`` (their difference), ``preference_accuracy`` (fraction of pairs
    with a positive gap), ``grad_norm``; under ``val/`` and ``test/`` ``loss`` and the same means.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`Algorithm`.
        loss: ``sigmoid``, ``hinge``, ``ipo``, ``robust`` or ``exo_pair``.
        beta: strength of the pull towards the reference.
        label_smoothing: assumed rate of swapped labels, for ``sigmoid``, ``robust`` and ``exo_pair`` (above 0).
        margin: gap by which the chosen answer must win; None is 0 for ``sigmoid`` and 1 for ``hinge``.
        reference_free: leave the reference out: ``gap = log pi(w) - log pi(l)``.
        length_normalized: take means over an answer's tokens, not sums, as TRL's ``sigmoid_norm`` and ``ipo``.
        sft_weight: weight of the chosen answer's negative mean log-probability per token.

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
        length_normalized: bool = False,
        sft_weight: NonNegativeFloat = 0.0,
    ) -> None:
        super().__init__(policies, optimization)
        self.check_no_dropout()
        self.loss = preference_loss(loss, beta=beta, label_smoothing=label_smoothing, margin=margin)
        self.beta, self.reference_free, self.reads_reference_sums = beta, reference_free, not reference_free
        self.length_normalized, self.sft_weight = length_normalized, sft_weight

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        sums, lengths = self.logp_sums(name, rows).view(-1, 2), rows.action_mask.sum(-1).view(-1, 2)
        references = torch.zeros_like(sums) if self.reference_free else not_none(rows.reference_sums).view(-1, 2)
        pairs, references = (x / lengths if self.length_normalized else x for x in (sums, references))
        gaps = preference_gap(*pairs.unbind(1), *references.unbind(1))
        losses = self.loss(gaps) - self.sft_weight * (sums / lengths)[:, 0]
        return losses, preference_metrics(gaps, self.beta * (pairs - references))
