"""Right and wrong answers to questions, for a model that tells one from the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from mrlm_pl.algorithms import CorrectnessModel
from mrlm_pl.answers.records import Answer, read_answers
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import scored_row
from mrlm_pl.data.option import data_option
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.losses import BatchTotals

logger = logging.getLogger(__name__)


class AnswerDataModule(FixedDataModule):
    """Answers that are right or wrong, shuffled anew in each epoch.

    A data row is ``{"question": text, "answer": text, "correct": true or false}``, as ``mrlm balance`` writes them;
    ``correct`` may also be a number in [0, 1], how likely the answer is right. An episode of ``mrlm collect`` does as
    well, but what is collected is seldom balanced: a model would learn which questions are easy.

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

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: int = 32,
        max_tokens: int | None = None,
        seed: int = 0,
        test: str | None = None,
    ) -> None:
        super().__init__({"train": train, "validation": validation, "test": test}, batch_size, seed)
        self.max_tokens = max_tokens
        self._answers = {split: _read(source, split) for split, source in self.sources.items()}
        _warn_of_shared_questions(self.sources, self._answers)
        self.rows: dict[DataSplit, list[Trajectory]] = {}
        self._labels: dict[DataSplit, list[float]] = {}
        self._questions: dict[DataSplit, list[int]] = {}

    def setup(self, stage: str) -> None:
        algorithm = self.algorithm()
        if not isinstance(algorithm, CorrectnessModel):
            raise ConfigurationError(
                f"AnswerDataModule is for CorrectnessModel, not for {type(algorithm).__name__}; give that one "
                f"{data_option(algorithm)}"
            )
        name, policy = self.learner()
        limit = self.max_tokens or policy.context_window
        for split in self._answers.keys() - self.rows.keys():
            source, answers = self.sources[split], self._answers[split]
            made = [
                (
                    scored_row(
                        [Message("user", item.question)], [Message("assistant", item.answer)], policy.chat, name
                    ),
                    item,
                )
                for item in answers
            ]
            kept = [(row, item) for row, item in made if len(row.token_ids) <= limit]
            if len(kept) < len(made):
                logger.warning(
                    "left out %d of %d answers of %s that are longer than %d tokens",
                    len(made) - len(kept),
                    len(made),
                    source,
                    limit,
                )
            _check_kinds([item for _, item in kept], f"{source}, of which {len(kept)} answers fit into {limit} tokens")
            numbers: dict[str, int] = {}
            self._questions[split] = [numbers.setdefault(item.question, len(numbers)) for _, item in kept]
            self._labels[split] = [item.correct for _, item in kept]
            self.rows[split] = [row for row, _ in kept]

    def count(self, split: DataSplit) -> int:
        return len(self.rows.get(split, ()))

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        rows = [self.rows[split][index] for index in chosen]
        questions = [self._questions[split][index] for index in chosen]
        table = collate_rows(rows, questions, questions, list(range(len(rows))))
        table.correct = torch.tensor([self._labels[split][index] for index in chosen], dtype=torch.float32)
        return {self.learner()[0]: table}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        tokens = float(sum(self.rows[split][index].num_actions for index in update))
        return {self.learner()[0]: BatchTotals(tokens, float(len(update)), float(len(update)))}


def _read(source: str, split: str) -> list[Answer]:
    answers, failed = read_answers(source, split)
    if failed:
        logger.warning("left out %d failed episodes of %s", failed, source)
    _check_kinds(answers, source)
    return answers


def _warn_of_shared_questions(sources: Mapping[DataSplit, str], answers: Mapping[DataSplit, Sequence[Answer]]) -> None:
    """Say which questions that are evaluated on are trained on too."""
    trained = {answer.question for answer in answers["train"]}
    for split in answers.keys() - {"train"}:
        shared = {answer.question for answer in answers[split]} & trained
        if shared:
            logger.warning(
                "%d questions of %s are trained on too, such as %.80r", len(shared), sources[split], min(shared)
            )


def _check_kinds(answers: Sequence[Answer], source: str) -> None:
    """Nothing when there are right and wrong answers.

    Raises:
        DataError: there is one kind only: nothing could be told apart, and no curve be measured.
    """
    right = sum(answer.correct > 0.5 for answer in answers)
    wrong = sum(answer.correct < 0.5 for answer in answers)
    if not right or not wrong:
        raise DataError(
            f"{source}: {right} of {len(answers)} answers are right and {wrong} wrong; a verifier needs both: collect "
            "more at several temperatures, or make wrong ones with `mrlm balance --fill-wrong`"
        )
