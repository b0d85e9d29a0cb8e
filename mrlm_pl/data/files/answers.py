"""Right and wrong answers to questions, for a model that tells one from the other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.algorithms import KTO, CorrectnessModel
from mrlm_pl.answers.records import Answer, read_answers
from mrlm_pl.data.files.chat_rows import chat_rows, scored_row
from mrlm_pl.data.files.references import ReferencedDataModule
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.errors import DataError, counted
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.returns import labels
from mrlm_pl.seeding import derive_seed

logger = logging.getLogger(__name__)


class ScoredAnswer(NamedTuple):
    """An answer and its token row; for ``KTO`` also the row of its question with an answer to another question."""

    rows: tuple[Trajectory, ...]
    answer: Answer


class AnswerDataModule(ReferencedDataModule):
    """Answers that are right or wrong, shuffled in each epoch.

    A data row is ``{"question": text, "answer": text, "correct": true or false}``, as ``mrlm balance`` writes them;
    ``correct`` may also be a number in [0, 1], how likely the answer is right. An episode of ``mrlm collect`` does as
    well, but collected answers are seldom balanced: a verifier would learn which questions are easy. A pair
    ``{prompt, chosen, rejected}`` is a right and a wrong answer.

    ``CorrectnessModel`` is shown the whole conversation, ``KTO`` the answer after the generation prompt. For ``KTO``
    each question is also combined with an answer to another question, drawn once by ``seed``.

    Args:
        train: file (JSONL, JSON, CSV, Parquet, also with .zst or .gz), folder of episodes, or hub name.
        validation: source for the validation loop, in the same forms; None skips validation. No question should be in
            both.
        test: source for ``mrlm test``, in the same forms; optional.
        batch_size: number of answers in a batch, on each rank.
        max_tokens: longest conversation in tokens; longer ones are left out and counted. None is the model's context
            window.
        seed: seed of the shuffling; None is 0. The command passes ``--seed_everything``.

    Raises:
        DataError: a file is missing, a row lacks a field or has a label outside [0, 1], or all answers of a file are of
            one kind.
    """

    algorithms = (CorrectnessModel, KTO)
    unit = "answer"

    def read(self, source: str, split: str) -> list[Answer]:
        answers, failed = read_answers(source, split)
        if failed:
            logger.warning("left out %d failed episodes of %s", failed, source)
        _check_kinds(answers, source)
        return answers

    def tokenized(self, example: Answer) -> list[ScoredAnswer]:
        name, policy = self.learner()
        question = [Message("user", example.question)]
        if not isinstance(self.algorithm(), KTO):
            answer = [Message("assistant", example.answer)]
            return [ScoredAnswer((scored_row(question, answer, policy.chat, name),), example)]
        answers = [Message("assistant", text) for text in (example.answer, self._unrelated[example].answer)]
        return [ScoredAnswer(tuple(chat_rows(question, [text], policy.chat, name)[0] for text in answers), example)]

    def tokenize(self) -> None:
        if isinstance(self.algorithm(), KTO):
            self._unrelated: dict[Answer, Answer] = {}
            for split, answers in self._examples.items():
                self._unrelated.update(unrelated(answers, self.seed, self.sources[split]))
        super().tokenize()
        trained = {answer.question for answer in self._examples["train"]}
        for split, fitting in self.examples.items():
            _check_kinds(
                [example.answer for example in fitting], f"{self.sources[split]}, of which {len(fitting)} answers fit"
            )
            shared = {answer.question for answer in self._examples[split]} & trained
            if shared and split != "train":
                number = counted(len(shared), "training question")
                logger.warning("%s in %s too, such as %.80r", number, self.sources[split], min(shared))

    def taught(self, example: ScoredAnswer) -> tuple[float, Any]:
        return example.answer.correct, super().taught(example)

    def batches(self, examples: Sequence[ScoredAnswer]) -> dict[str, tuple[PolicyBatch, Tensor]]:
        rows = [(row, example.answer) for example in examples for row in example.rows]
        questions = labels(answer.question for _, answer in rows)
        batch = collate_rows([row for row, _ in rows], questions, questions, list(range(len(rows))))
        batch.correct = torch.tensor([answer.correct for _, answer in rows], dtype=torch.float32)
        return {self.learner()[0]: (batch, torch.arange(len(rows)))}


def unrelated(answers: Sequence[Answer], seed: int, source: str) -> list[tuple[Answer, Answer]]:
    """Return each answer with an answer to another question, the next in a random order.

    Raises:
        DataError: all answers are to one question.
    """
    generator = torch.Generator().manual_seed(derive_seed("unrelated", seed))
    order = [answers[index] for index in torch.randperm(len(answers), generator=generator).tolist()]
    pairs = []
    for place, answer in enumerate(order):
        following = (order[(place + step) % len(order)] for step in range(1, len(order)))
        other = next((candidate for candidate in following if candidate.question != answer.question), None)
        if other is None:
            raise DataError(
                f"{source}: all answers are to the question {answer.question!r:.80}; KTO estimates its baseline with "
                "answers to other questions: give answers to several"
            )
        pairs.append((answer, other))
    return pairs


def _check_kinds(answers: Sequence[Answer], source: str) -> None:
    """Validate that there are right and wrong answers.

    Raises:
        DataError: all answers are right, or all are wrong: there is nothing to separate and no curve to measure.
    """
    right = sum(answer.correct > 0.5 for answer in answers)
    wrong = sum(answer.correct < 0.5 for answer in answers)
    if not right or not wrong:
        raise DataError(
            f"{source}: {right} of {len(answers)} answers are right and {wrong} wrong; a verifier needs both: collect "
            "more at several temperatures, or make wrong ones with `mrlm balance --fill-wrong`"
        )
