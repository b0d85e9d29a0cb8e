"""Kahneman-Tversky optimization: individual answers, each desirable or undesirable."""

from __future__ import annotations

from torch import Tensor

from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.learner.optimization import Optimization
from mrlm_pl.losses import kto_loss
from mrlm_pl.policy import Policy
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, not_all_zero


class KTO(GivenAnswersAlgorithm):
    """Kahneman-Tversky optimization (arXiv 2402.01306).

    For an answer ``y`` to a question ``x``, summed over its tokens::

        h    = log pi(y | x) - log pi_ref(y | x)
        z    = max(0, mean over the micro-batch of log pi(y' | x) - log pi_ref(y' | x)),  without gradient
        loss = mean over answers of  desirable_weight (1 - sigmoid(beta (h - z)))      where the answer is desirable
                                     undesirable_weight (1 - sigmoid(beta (z - h)))    where it is not

    ``y'`` is an answer to another question, so ``z`` estimates the divergence from the reference. The estimate is that
    of the rank's micro-batch, as in the paper: give it several answers (``data.batch_size``). The reference is the
    policy before its first update; its log-probabilities are computed once for all answers. Use it with
    ``AnswerDataModule``, whose label between 0 and 1 weighs both losses.

    Logged under ``train/``: ``baseline_kl`` (``z``), ``reward_margin`` (mean of ``beta (h - z)``, negated for
    undesirable answers), ``preference_accuracy`` (fraction of answers on their side of ``z``), ``grad_norm``; under
    ``val/`` and ``test/`` ``loss`` and the same means.

    Args:
        policies: weights by name; one policy.
        optimization: see :class:`~mrlm_pl.learner.algorithm.Algorithm`.
        beta: strength of the pull towards the reference.
        desirable_weight, undesirable_weight: weights of the two kinds; TRL recommends a ratio of their sums over the
            data between 1 and 4/3.

    Raises:
        ConfigurationError: there are several policies, a value is out of range, or both weights are 0.
    """

    data_module = "AnswerDataModule"
    reads_reference_sums = True

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        optimization: Optimization = Optimization(),  # noqa: B008 (frozen)
        beta: PositiveFloat = 0.1,
        desirable_weight: NonNegativeFloat = 1.0,
        undesirable_weight: NonNegativeFloat = 1.0,
    ) -> None:
        super().__init__(policies, optimization)
        self.check_no_dropout()
        not_all_zero("KTO: ", desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
        self.beta = beta
        self.weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        ratios, unrelated = (self.logp_sums(name, rows) - not_none(rows.reference_sums)).view(-1, 2).unbind(1)
        desirable, baseline = not_none(rows.correct).view(-1, 2)[:, 0], unrelated.detach().mean().clamp(min=0.0)
        ahead = self.beta * (ratios.detach() - baseline)
        metrics = {
            "baseline_kl": baseline,
            "reward_margin": ((2.0 * desirable - 1.0) * ahead).mean(),
            "preference_accuracy": ((ahead > 0) == (desirable > 0.5)).float().mean(),
        }
        return kto_loss(ratios, desirable, baseline, beta=self.beta, **self.weights), metrics
