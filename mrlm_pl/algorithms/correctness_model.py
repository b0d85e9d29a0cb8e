"""A verifier of individual answers: the probability that an answer to a question is right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryCalibrationError

from mrlm_pl.errors import NonFiniteError
from mrlm_pl.learner.batch import Batch, PolicyBatch, not_none
from mrlm_pl.learner.critics import ScoreHead
from mrlm_pl.learner.given_answers import GivenAnswersAlgorithm
from mrlm_pl.losses import correctness_loss, last_token_mask
from mrlm_pl.losses.masking import masked_values
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.logprobs import token_values
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.value_head import ValueHead
from mrlm_pl.settings import NonNegativeFloat

ScoreTokens = Literal["last", "response"]


class QuestionProbe(ValueHead):
    """A linear guess of the label from the state before the answer begins; it leaves the state as it is."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits [...] of hidden states [..., hidden size], without a gradient for these."""
        return super().forward(hidden.detach())


class CorrectnessModel(GivenAnswersAlgorithm):
    """A verifier trained on answers that are right or wrong (arXiv 2502.18439).

    ``s_t`` is the value before token t of question and answer in the chat template, ``c`` 1 for a right answer::

        loss = mean over answers of  -c log sigmoid(s_t) - (1 - c) log(1 - sigmoid(s_t)),  t the last token
               (score_tokens: response: the mean of this over the tokens after the answer's first)

    The score of an answer is the value before the last token, whatever was trained; ``sigmoid`` of it the probability
    that the answer is right. Use it with ``AnswerDataModule``. The folder ``policies/NAME`` of a run is a reward model.

    A probe, linear on the state before the answer begins, is trained along without moving the model: that state knows
    the question alone. If each question has as many right as wrong answers it cannot do better than chance; where it
    does, the data let a verifier guess from the question.

    Logged under ``train/``: ``accuracy`` (score above 0 where the label is above 0.5), ``question_only_loss`` (nats of
    the probe; ln 2 = 0.6931 is chance), ``grad_norm``, ``grad_norm_value``, ``grad_norm_question_only``. Under ``val/``
    and ``test/``: ``loss``, ``auc`` and ``accuracy`` of the scores, ``calibration_error`` (expected, 10 bins of the
    probability) and ``question_only_auc``, the area under the curve of the probe's guess; NaN where it is not defined.

    Args:
        score_tokens: tokens at which the score is trained: the ``last`` token or the whole ``response``.
        value_learning_rate: learning rate of the value head and the probe; None is the policy's.
        policies, optimization: see :class:`~mrlm_pl.learner.given_answers.GivenAnswersAlgorithm`.

    Raises:
        ConfigurationError: there are several policies, or an unknown name.
    """

    data_module = "AnswerDataModule"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        *,
        score_tokens: ScoreTokens = "last",
        value_learning_rate: NonNegativeFloat | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(policies, **settings)
        self.critic: ScoreHead = ScoreHead({}, self.learners, value_learning_rate)
        self.score_tokens = score_tokens
        self.answer_measures: Any = nn.ModuleDict({"val": AnswerMeasures(), "test": AnswerMeasures()})

    def read_weights(self) -> None:
        super().read_weights()
        if not hasattr(self, "question_probe"):
            (policy,) = self.learners.values()
            self.question_probe = QuestionProbe(not_none(policy.value_head).linear.in_features)

    def networks(self) -> list[nn.Module]:
        return [*super().networks(), *(module for module in self.children() if isinstance(module, QuestionProbe))]

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        head = groups[-1]
        probe = list(self.question_probe.parameters())
        return [*groups, {**head, "params": probe, "name": f"{head['policy']}/question_only"}]

    def idle_loss(self, name: str) -> Tensor:
        policy = self.policy(name)
        guess = token_values(policy.model, self.question_probe, policy.idle_row()).sum()
        return policy.idle_values() + guess  # 0, with a gradient for the probe

    def compare(self, name: str, rows: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        losses, scores = self._losses(name, rows)
        guesses = self._question_losses(name, rows)[0]
        agree = ((scores > 0) == (not_none(rows.correct) > 0.5)).float()
        metrics = {"accuracy": agree.mean(), "question_only_loss": guesses.mean()}
        return losses + (guesses - guesses.detach()), metrics  # the loss is the verifier's alone

    def _losses(self, name: str, rows: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Return the loss [B] of each answer, and its score [B]."""
        mask, last = self._scored(rows.action_mask), last_token_mask(rows.action_mask)
        values = self.critic.scores(name, rows, self._scored, self.global_step)
        losses = correctness_loss(values, not_none(rows.correct), mask).sum(1) / mask.sum(1)
        return losses, masked_values(values.detach(), last).sum(1)

    def _scored(self, action_mask: Tensor) -> Tensor:
        """Return [B, T] bool, True for the tokens before which the score is trained."""
        last = last_token_mask(action_mask)
        return last if self.score_tokens == "last" else _after_first(action_mask) | last

    def _question_losses(self, name: str, rows: PolicyBatch) -> tuple[Tensor, Tensor]:
        """Return the probe's loss [B] for each answer, and its logits [B]; the answers themselves are cut off."""
        policy, host = self.policy(name), rows.layout
        first = host.action_mask & ~_after_first(host.action_mask)
        width = int(first.nonzero()[:, 1].max()) + 1
        lengths = host.lengths.clamp(max=width)
        questions = TokenRows(host.token_ids[:, :width], lengths, first[:, :width], prefix_groups=host.groups)
        values = token_values(policy.model, self.question_probe, questions, max_tokens=policy.max_forward_tokens)
        logits = values.sum(1, keepdim=True)  # 0 but at the first tokens
        losses = correctness_loss(logits, not_none(rows.correct), torch.ones_like(logits, dtype=torch.bool))
        return losses[:, 0], logits.detach()[:, 0]

    def measure(self, prefix: str, batch: Batch) -> None:
        nothing = torch.zeros(0, dtype=torch.float32, device=self.device)
        measured: Mapping[str, Tensor] = {"scores": nothing, "question_scores": nothing, "correct": nothing}
        for name, rows in self.measured_rows(batch):
            losses, scores = self._losses(name, rows)
            if bad := int((~losses.isfinite()).sum()):
                raise NonFiniteError(f"{bad} of {len(losses)} losses are not finite: scores, or labels outside [0, 1]")
            self.metrics.add_evaluation_means(prefix, {"loss": losses.mean()}, len(losses))
            guesses = self._question_losses(name, rows)[1]
            measured = {"scores": scores, "question_scores": guesses, "correct": not_none(rows.correct)}
        self.answer_measures[prefix].add(**measured)

    def evaluation_metrics(self, prefix: str) -> dict[str, float]:
        own = {f"{prefix}/{name}": value for name, value in self.answer_measures[prefix].take().items()}
        return super().evaluation_metrics(prefix) | own


def _after_first(action_mask: Tensor) -> Tensor:
    """Return the action tokens [B, T] without each row's first: the state before that knows the question alone."""
    return action_mask & (action_mask.long().cumsum(1) > 1)


CALIBRATION_BINS = 10
_TIE_DECIMALS = 4


class AnswerMeasures(nn.Module):
    """Area under the curve, accuracy and calibration of an evaluation loop; every rank must update in every batch.

    An answer whose label is exactly 0.5 is neither right nor wrong and does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.auc = BinaryAUROC()
        self.question_only_auc = BinaryAUROC()
        self.accuracy = BinaryAccuracy()
        self.calibration_error = BinaryCalibrationError(n_bins=CALIBRATION_BINS, norm="l1")
        self.right, self.wrong = SumMetric(), SumMetric()

    def add(self, scores: Tensor, question_scores: Tensor, correct: Tensor) -> None:
        """Count answers, of which there may be none.

        Args:
            scores: [B], logits that the answers are right.
            question_scores: [B], logits from the questions alone.
            correct: [B], labels in [0, 1].
        """
        decided = correct != 0.5
        labels = (correct[decided] > 0.5).long()
        chances = torch.sigmoid(scores[decided])
        # A question's state has other last bits in another batch, and the order of equal scores must not depend on it.
        guesses = torch.sigmoid(question_scores[decided]).mul(10**_TIE_DECIMALS).round()
        self.auc.update(chances, labels)
        self.question_only_auc.update(guesses / 10**_TIE_DECIMALS, labels)
        self.right.update(labels.sum())
        self.wrong.update((1 - labels).sum())
        self.calibration_error.update(chances, labels)
        if labels.numel():  # the others gather what each rank has, which must be of one type; this one only adds up
            self.accuracy.update(chances, labels)

    def take(self) -> dict[str, float]:
        """Return the numbers by name, and reset the counts; a number that is not defined is NaN.

        The curve is not defined without right or without wrong answers, and no number is defined without answers.
        """
        right, wrong = float(self.right.compute()), float(self.wrong.compute())
        numbers = {}
        for name in ("auc", "question_only_auc", "accuracy", "calibration_error"):
            metric = getattr(self, name)
            value = float(metric.compute()) if right + wrong else math.nan
            numbers[name] = math.nan if name.endswith("auc") and not (right and wrong) else value
        for metric in self.children():
            metric.reset()  # type: ignore[operator]
        return numbers
