"""How well scores tell right answers from wrong ones, over all batches and ranks of an evaluation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryCalibrationError

CALIBRATION_BINS = 10
_TIE_DECIMALS = 4


class AnswerMeasures(nn.Module):
    """Area under the curve, accuracy and calibration of an evaluation loop; every rank must update in every batch.

    An answer whose label is exactly .5 is neither right nor wrong and does not count.
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
            scores: [B] logits of the answers being right.
            question_scores: [B] logits that know the question alone.
            correct: [B] labels in [0, 1].
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
        """The numbers by name, after which counting begins anew; a number that is not defined is NaN.

        Without right, or without wrong answers there is no curve, and without either nothing at all.
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
