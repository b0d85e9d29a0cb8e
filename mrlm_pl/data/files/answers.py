"""Right and wrong answers to questions, for a model that tells one from the other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.algorithms import KTO, CorrectnessModel
from mrlm_pl.answers.records import Answer, answer_of_row, answers_of_episode, label_of
from mrlm_pl.data.files.chat_rows import Demonstration, answer_row, scored_row
from mrlm_pl.data.files.demonstrations import demonstration_of
from mrlm_pl.data.files.preferences import pair_of
from mrlm_pl.data.files.references import ReferencedDataModule
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import DataError, counted
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.returns import labels
from mrlm_pl.seeding import derive_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LabeledAnswer:
    """An answer with its question.

    Args:
        conversation: the question is given, the answer shown.
        correct: 1 for a right answer, 0 for a wrong one; between them, how likely it is right.
        rows: the answer's token row; for ``KTO`` also that of its question with an answer to another question.
    """

    conversation: Demonstration
    correct: float
    rows: tuple[Trajectory, ...] = ()

    @property
    def question(self) -> str:
        """Text of the question, equal for equal questions."""
        given = self.conversation.given
        return given[0].content if len(given) == 1 else str([message.to_chat() for message in given])


def labeled(answer: Answer) -> LabeledAnswer:
    """Return an answer as a user's message and its reply."""
    conversation = Demonstration([Message("user", answer.question)], [Message("assistant", answer.answer)])
    return LabeledAnswer(conversation, answer.correct)


class AnswerDataModule(ReferencedDataModule):
    """Answers that are right or wrong, shuffled in each epoch.

    A data row is one of

    - ``{"question": text, "answer": text, "correct": true or false}``, as ``mrlm balance`` writes them: a user's
      message and the reply; ``correct`` may also be a number in [0, 1], how likely the answer is right;
    - ``{"prompt": ..., "completion": ..., "label": true or false}``, texts or lists of messages as in demonstrations;
    - ``{"prompt": ..., "chosen": ..., "rejected": ...}``, a pair as in ``PreferenceDataModule``: a right and a wrong
      answer;
    - an episode of ``mrlm collect``; but collected answers are seldom balanced: a verifier would learn which questions
      are easy.

    ``CorrectnessModel`` reads all as chats, without tools. ``KTO`` compares an answer's assistant messages, or plain
    text and the EOS token. For ``KTO`` each question is also combined with an answer to another question, drawn once by
    ``seed``.

    Args:
        train: file (JSONL, JSON, CSV or Parquet, optionally .zst or .gz), folder of episodes, or hub name.
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
    form = "{question, answer, correct}, {prompt, completion, label}, {prompt, chosen, rejected} or an episode"

    def read(self, source: str, split: str) -> list[LabeledAnswer]:
        answers = [answer for answers_of_record in super().read(source, split) for answer in answers_of_record]
        _check_kinds(answers, source)
        return answers

    def of_row(self, row: Mapping[str, Any]) -> list[LabeledAnswer]:
        if {"chosen", "rejected"} <= row.keys():
            pair: Any = pair_of(row)
            return [LabeledAnswer(pair.chosen, 1.0), LabeledAnswer(pair.rejected, 0.0)]
        if "completion" in row:
            return [LabeledAnswer(demonstration_of(row), label_of(row, "label"))]
        return [labeled(answer_of_row(row))]

    def of_episodes(self, episodes: Sequence[Episode], source: str) -> list[Any]:
        return [map(labeled, answers_of_episode(episode, f"{source}, episode {episode.id!r}")) for episode in episodes]

    def tokenized(self, example: LabeledAnswer) -> list[LabeledAnswer]:
        name, policy = self.learner()
        answer = example.conversation
        if isinstance(self.algorithm(), KTO):
            shown = (answer, answer._replace(shown=self._unrelated[example].conversation.shown))
            rows = [answer_row(conversation, policy.chat, name, "completion") for conversation in shown]
        else:
            written = answer.written(policy.chat)
            rows = [scored_row(written.given, written.shown, policy.chat, name)]
        return [replace(example, rows=tuple(rows))]

    def tokenize(self) -> None:
        if isinstance(self.algorithm(), KTO):
            self._unrelated: dict[LabeledAnswer, LabeledAnswer] = {}
            for split, answers in self._examples.items():
                self._unrelated |= unrelated(answers, self.seed, self.sources[split])
        super().tokenize()
        trained = {answer.question for answer in self._examples["train"]}
        for split, fitting in self.examples.items():
            _check_kinds(fitting, f"{self.sources[split]}, of which {len(fitting)} answers fit")
            shared = {answer.question for answer in self._examples[split]} & trained
            if shared and split != "train":
                number = counted(len(shared), "training question")
                logger.warning("%s in %s too, such as %.80r", number, self.sources[split], min(shared))

    def taught(self, example: LabeledAnswer) -> tuple[float, Any]:
        return example.correct, super().taught(example)

    def batches(self, examples: Sequence[LabeledAnswer]) -> dict[str, tuple[PolicyBatch, Tensor]]:
        rows = [(row, answer) for answer in examples for row in answer.rows]
        questions = labels(answer.question for _, answer in rows)
        batch = collate_rows([row for row, _ in rows], questions, questions, list(range(len(rows))))
        batch.correct = torch.tensor([answer.correct for _, answer in rows], dtype=torch.float32)
        return {self.learner()[0]: (batch, torch.arange(len(rows)))}


def unrelated(answers: Sequence[LabeledAnswer], seed: int, source: str) -> dict[LabeledAnswer, LabeledAnswer]:
    """Return by answer an answer to another question, the next in a random order.

    Raises:
        DataError: all answers are to one question.
    """
    if len({answer.question for answer in answers}) == 1:
        raise DataError(
            f"{source}: all answers are to the question {answers[0].question!r:.80}; KTO estimates its baseline with "
            "answers to other questions: give answers to several"
        )
    generator = torch.Generator().manual_seed(derive_seed("unrelated", seed))
    order = [answers[index] for index in torch.randperm(len(answers), generator=generator).tolist()]
    others = {}
    for place, answer in enumerate(order):
        following = (order[(place + step) % len(order)] for step in range(1, len(order)))
        others[answer] = next(candidate for candidate in following if candidate.question != answer.question)
    return others


def _check_kinds(answers: Sequence[LabeledAnswer], source: str) -> None:
    """Validate that there are right and wrong answers.

    Raises:
        DataError: all answers are right, or all are wrong: there is nothing to separate and no curve to measure.
    """
    right = sum(answer.correct > 0.5 for answer in answers)
    wrong = sum(answer.correct < 0.5 for answer in answers)
    if not right or not wrong:
        raise DataError(
            f"{source}: {right} of {len(answers)} answers are right and {wrong} wrong; both are needed: collect "
            "more at several temperatures, or make wrong ones with `mrlm balance --fill-wrong`"
        )
