"""Right and wrong answers to questions, for a model that tells one from the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from mrlm_pl.algorithms import CorrectnessModel
from mrlm_pl.answers.records import Answer, read_answers
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import scored_row
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.losses import BatchTotals

logger = logging.getLogger(__name__)


class ScoredAnswer(NamedTuple):
    """An answer and its token row."""

    row: Trajectory
    answer: Answer


class AnswerDataModule(FixedDataModule):
    """Answers that are right or wrong, shuffled in each epoch.

    A data row is ``{"question": text, "answer": text, "correct": true or false}``, as ``mrlm balance`` writes them;
    ``correct`` may also be a number in [0, 1], how likely the answer is right. An episode of ``mrlm collect`` does as
    well, but collected answers are seldom balanced: a model would learn which questions are easy.

    Args:
        train: file (JSONL, JSON, parquet, also gzipped), folder of episodes, or hub name.
        validation: the same for the validation loop; None has none. No question should be in both.
        test: the same for ``mrlm test``; None has none.
        batch_size: answers in a batch, on each rank.
        max_tokens: longer conversations are left out and counted; None is the model's context window.
        seed: of the shuffling; the command line passes ``seed_everything``.

    Raises:
        DataError: a file is missing, a row lacks a field or has a label outside [0, 1], or all answers of a file are of
            one kind.
    """

    algorithms = (CorrectnessModel,)
    unit = "answer"

    def read(self, source: str, split: str) -> list[Answer]:
        answers, failed = read_answers(source, split)
        if failed:
            logger.warning("left out %d failed episodes of %s", failed, source)
        _check_kinds(answers, source)
        return answers

    def tokenized(self, example: Answer, where: str) -> list[ScoredAnswer]:
        name, policy = self.learner()
        messages = [Message("user", example.question)], [Message("assistant", example.answer)]
        return [ScoredAnswer(scored_row(*messages, policy.chat, name), example)]

    def rows_of(self, example: ScoredAnswer) -> Sequence[Trajectory]:
        return (example.row,)

    def setup(self, stage: str) -> None:
        first = not self.examples
        super().setup(stage)
        if first:
            _warn_of_shared_questions(self.sources, self._examples)
        for split, kept in self.examples.items():
            _check_kinds([item.answer for item in kept], f"{self.sources[split]}, of which {len(kept)} answers fit")

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        found: list[ScoredAnswer] = [self.examples[split][index] for index in chosen]
        numbers: dict[str, int] = {}
        questions = [numbers.setdefault(item.answer.question, len(numbers)) for item in found]
        table = collate_rows([item.row for item in found], questions, questions, list(range(len(found))))
        table.correct = torch.tensor([item.answer.correct for item in found], dtype=torch.float32)
        return {self.learner()[0]: table}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        tokens = float(sum(self.examples[split][index].row.num_actions for index in update))
        return {self.learner()[0]: BatchTotals(tokens, float(len(update)), float(len(update)))}


def _warn_of_shared_questions(sources: Mapping[DataSplit, str], answers: Mapping[DataSplit, Sequence[Answer]]) -> None:
    """Warn of questions in both training and evaluation."""
    trained = {answer.question for answer in answers["train"]}
    for split in answers.keys() - {"train"}:
        shared = {answer.question for answer in answers[split]} & trained
        if shared:
            logger.warning(
                "%d questions of %s are trained on too, such as %.80r", len(shared), sources[split], min(shared)
            )


def _check_kinds(answers: Sequence[Answer], source: str) -> None:
    """Validate that there are right and wrong answers.

    Raises:
        DataError: there is one kind only: there is nothing to separate and no curve to measure.
    """
    right = sum(answer.correct > 0.5 for answer in answers)
    wrong = sum(answer.correct < 0.5 for answer in answers)
    if not right or not wrong:
        raise DataError(
            f"{source}: {right} of {len(answers)} answers are right and {wrong} wrong; a verifier needs both: collect "
            "more at several temperatures, or make wrong ones with `mrlm balance --fill-wrong`"
        )
