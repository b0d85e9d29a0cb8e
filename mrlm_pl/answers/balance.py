"""Balance right and wrong answers to each question, so that the question alone predicts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mrlm_pl.answers.records import Answer
from mrlm_pl.answers.wrong import plain, wrong_answers
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import grouped
from mrlm_pl.seeding import derive_seed, keyed_random
from mrlm_pl.settings import FractionBelowOne, PositiveInt, check_arguments

ONLY_RIGHT, ONLY_WRONG, CONTRADICTED = "only right answers", "only wrong answers", "only contradicted answers"


@dataclass(frozen=True)
class BalancedAnswers:
    """Balanced answers.

    Args:
        splits: the answers of ``train`` and ``validation`` by question, right ones first; no question is in both.
        report: counts of read, dropped and kept answers, as JSON-like data.
    """

    splits: dict[str, list[Answer]]
    report: dict[str, Any]


@dataclass
class _Question:
    """One question in its first form, with its read, distinct and kept answers."""

    text: str
    read: list[Answer] = field(default_factory=list)
    right: list[Answer] = field(default_factory=list)
    wrong: list[Answer] = field(default_factory=list)
    contradicted: int = 0
    kept: list[Answer] = field(default_factory=list)
    generated: int = 0

    @property
    def lack(self) -> str:
        """Return the reason why no answer is kept."""
        return ONLY_RIGHT if self.right else ONLY_WRONG if self.wrong else CONTRADICTED


@check_arguments
def balance(
    answers: Sequence[Answer],
    *,
    per_question: PositiveInt | None = None,
    seed: int = 0,
    fill_wrong: bool = False,
    validation_share: FractionBelowOne = 0.2,
) -> BalancedAnswers:
    """Return equal numbers of right and wrong answers to each question, split by question for training and validation.

    Questions or answers that differ only in whitespace are the same. An answer labeled both right and wrong is dropped.
    The seed draws the dropped surplus answers and the validation questions, independently of the order of the answers.

    Args:
        answers: right ones with ``correct`` 1, wrong ones with 0.
        per_question: maximum number of right, and of wrong, answers to a question; None keeps all with a counterpart.
        seed: seed of all choices.
        fill_wrong: generate missing wrong answers from right ones; see
            :func:`mrlm_pl.answers.wrong.wrong_answers`.
        validation_share: fraction of the kept questions for validation; at least one question stays for training.

    Raises:
        ConfigurationError: a number is out of its range.
        DataError: a label is between 0 and 1, or no question has both kinds of answers.
    """
    questions = _questions(answers)
    for question in questions:
        _choose(question, per_question, seed, fill_wrong)
    balanced = [question for question in questions if question.kept]
    if not balanced:
        lacks = {lack: sum(question.lack == lack for question in questions) for lack in (ONLY_RIGHT, ONLY_WRONG)}
        counts = ", ".join(f"{count} have {lack}" for lack, count in lacks.items())
        remedy = "collect more of each at several temperatures" + ("" if fill_wrong else ", or use --fill-wrong")
        raise DataError(f"none of {len(questions)} questions has right and wrong answers: {counts}; {remedy}")
    validation_texts = _validation_texts(balanced, seed, validation_share)
    by_split = {
        "train": [question for question in balanced if question.text not in validation_texts],
        "validation": [question for question in balanced if question.text in validation_texts],
    }
    splits = {
        name: [answer for question in split_questions for answer in question.kept]
        for name, split_questions in by_split.items()
    }
    return BalancedAnswers(splits, _report(questions, by_split, seed))


def _questions(answers: Sequence[Answer]) -> list[_Question]:
    """Return the questions in order, with their distinct answers."""
    questions: dict[str, _Question] = {}
    for answer in answers:
        if answer.correct not in (0.0, 1.0):
            raise DataError(f"'correct' is {answer.correct} of {answer.answer!r:.80}; to balance, answers are 1 or 0")
        question = questions.setdefault(plain(answer.question), _Question(answer.question))
        question.read.append(replace(answer, question=question.text))
    for question in questions.values():
        for same in grouped((plain(answer.answer), answer) for answer in question.read).values():
            if len({answer.correct for answer in same}) > 1:
                question.contradicted += len(same)
            else:
                (question.right if same[0].correct else question.wrong).append(same[0])
    return list(questions.values())


def _choose(question: _Question, per_question: int | None, seed: int, fill_wrong: bool) -> None:
    """Choose the answers to a question that are kept."""
    limit = len(question.right) if per_question is None else min(per_question, len(question.right))
    right = _shuffle(question.right, seed, question.text)
    wrong = _shuffle(question.wrong, seed, question.text)
    if fill_wrong and len(wrong) < limit:
        existing = {answer.answer for answer in question.read}  # including those labeled both right and wrong
        rng = keyed_random("wrong answers", seed, question.text)
        texts = wrong_answers(question.text, [answer.answer for answer in right], limit - len(wrong), existing, rng)
        source = right[0]
        wrong += [Answer(source.question, text, 0.0, source.task, None, True) for text in texts]
        question.generated = len(texts)
    count = min(limit, len(wrong))
    question.kept = right[:count] + wrong[:count]


def _shuffle(answers: Sequence[Answer], seed: int, question: str) -> list[Answer]:
    """Return the answers in a random order that depends on their texts alone."""
    return sorted(answers, key=lambda answer: derive_seed("answer", seed, question, plain(answer.answer)))


def _validation_texts(questions: Sequence[_Question], seed: int, share: float) -> set[str]:
    """Return the texts of the validation questions: at least one of two or more if ``share`` is above 0, never all."""
    order = sorted((question.text for question in questions), key=lambda text: derive_seed("held out", seed, text))
    if not share or len(order) < 2:
        return set()
    return set(order[: min(max(round(share * len(order)), 1), len(order) - 1)])


def _report(questions: Sequence[_Question], by_split: dict[str, list[_Question]], seed: int) -> dict[str, Any]:
    read = [answer for question in questions for answer in question.read]
    kept = [answer for question in questions for answer in question.kept]
    dropped = [question for question in questions if not question.kept]
    contradicted = sum(question.contradicted for question in questions)
    generated = sum(question.generated for question in questions)
    distinct = sum(len(question.right) + len(question.wrong) for question in questions)
    balances = [(_count_right(question.kept), len(question.kept)) for question in questions if question.kept]
    return {
        "seed": seed,
        "questions": {
            "read": len(questions),
            "kept": len(questions) - len(dropped),
            "dropped": {lack: sum(q.lack == lack for q in dropped) for lack in (ONLY_RIGHT, ONLY_WRONG, CONTRADICTED)},
        },
        "answers": {
            "read": len(read),
            "duplicates": len(read) - distinct - contradicted,
            "contradicted": contradicted,
            "dropped": distinct + generated - len(kept),
            "generated": generated,
            "kept": len(kept),
        },
        "right_share": {"before": _count_right(read) / len(read), "after": _count_right(kept) / len(kept)},
        "balance": {
            "max_difference": max(abs(2 * right - count) for right, count in balances),
            "fewest_answers": min(count for _, count in balances),
            "most_answers": max(count for _, count in balances),
        },
        "splits": {
            name: {
                "questions": len(split_questions),
                "answers": sum(len(question.kept) for question in split_questions),
                "right": sum(_count_right(question.kept) for question in split_questions),
            }
            for name, split_questions in by_split.items()
        },
        "dropped_questions": [
            {"question": question.text, "why": question.lack, "answers": len(question.read)} for question in dropped
        ],
    }


def _count_right(answers: Sequence[Answer]) -> int:
    return sum(answer.correct == 1.0 for answer in answers)
