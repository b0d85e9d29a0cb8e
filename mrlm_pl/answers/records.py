"""Answers that are known to be right or wrong: rows of a file, or the episodes of ``mrlm collect``. Free of torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mrlm_pl.environment.rows import numbered_rows
from mrlm_pl.episode import Episode, Trajectory, question_to
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import DataError, counted
from mrlm_pl.turn_tree import episodes_of, holds_episodes

_FORM = '{"question": text, "answer": text, "correct": true or false}'
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a reply's reasoning in a row of chats, those that transformers reads."""
SCORE = "score"
"""The component of a turn's reward that says how right the answer of one agent among several is, from 0 to 1."""


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    Args:
        question: the text that was answered.
        answer: the reply.
        correct: 1 for a right answer, 0 for a wrong one; between them, how likely it is right.
        task: the key of the task, if it had one.
        temperature: temperature at which it was sampled, if it was sampled.
        generated: whether it was generated from a right answer.
    """

    question: str
    answer: str
    correct: float
    task: str = ""
    temperature: float | None = None
    generated: bool = False

    def to_row(self) -> dict[str, Any]:
        """Return the answer as it is written to a file; ``correct`` is true or false where it is 1 or 0."""
        row = asdict(self)
        row["correct"] = bool(self.correct) if self.correct in (0.0, 1.0) else self.correct
        if not self.generated:
            del row["generated"]
        return row


def read_answers(source: str, split: str = "train") -> tuple[list[Answer], int]:
    """Return the answers of a source in order, and how many failed episodes were left out.

    A source holds rows of :class:`Answer`, or episode records. In an episode the agent's first user message is the
    question, its last reply the answer, and ``success`` says whether it is right. If several agents answer, or one
    several times for a ``score``, each turn is an answer, right with a score above 0.5; an agent that begins with what
    others said, such as a leader, answers their question.

    Args:
        source: rows in a form of :func:`mrlm_pl.environment.rows.read_rows`, or a folder of episodes.
        split: split of a hub data set.

    Raises:
        DataError: the source is missing, or a row has neither form; the message names file, row and field.
    """
    answers: list[Answer] = []
    failed = 0
    for where, episode, row in read_records(source, split):
        if episode is None:
            answers.append(answer_of_row(row, f"{where}: "))
        elif episode.failed:
            failed += 1
        else:
            answers += answers_of_episode(episode, where)
    if not answers:
        raise DataError(f"{source}: every episode failed, {failed} in all; there are no answers in it")
    return answers, failed


def read_records(source: str, split: str) -> Iterator[tuple[str, Episode | None, dict[str, Any]]]:
    """Yield the place of each record of a source, and the record: an episode, or else a row.

    Args:
        source: rows in a form of :func:`mrlm_pl.environment.rows.read_rows`, or a folder of episodes.
        split: split of a hub data set.

    Raises:
        DataError: the source is missing or unreadable, or a record of an episode is broken.
    """
    if Path(source).expanduser().is_dir():
        for number, episode in enumerate(read_episodes(Path(source).expanduser()), start=1):
            yield f"{source}, episode {number}", episode, {}
        return
    for number, row in numbered_rows(source, split, ()):
        where = f"{source}, row {number}"
        if not holds_episodes(row):
            yield where, None, row
            continue
        try:
            for episode in episodes_of(row):
                yield where, episode, row
        except ValueError as error:
            raise DataError(f"{where} is not an episode record, as its trajectories promise: {error}") from error


def answer_of_row(row: Mapping[str, Any], where: str = "") -> Answer:
    """Return the answer that a row holds.

    Raises:
        DataError: a field is missing or of another kind; the message begins with ``where``.
    """
    for name in ("question", "answer", "correct"):
        if name not in row:
            raise DataError(f"{where}no field {name!r} among {sorted(row)}; an answer is {_FORM}")
    question, answer, temperature = row["question"], row["answer"], row.get("temperature")
    task, generated = row.get("task") or "", row.get("generated") or False
    sampled = temperature is None or _is_number(temperature, 0.0, sys.float_info.max)
    for name, value, holds, form in (
        ("question", question, isinstance(question, str) and question.strip(), f"text, as in {_FORM}"),
        ("answer", answer, isinstance(answer, str), f"text, as in {_FORM}"),
        ("task", task, isinstance(task, str), "the text of a key, or be left out"),
        ("temperature", temperature, sampled, "a number of 0 or above, or left out"),
        ("generated", generated, isinstance(generated, bool), "true or false, or be left out"),
    ):
        if not holds:
            raise DataError(f"{where}{name!r} is {value!r:.80}; it must be {form}")
    temperature = None if temperature is None else float(temperature)
    return Answer(question, answer, label_of(row, "correct", where), task, temperature, generated)


def label_of(row: Mapping[str, Any], field: str, where: str = "") -> float:
    """Return the label in a field of a row: 1 for a right answer, 0 for a wrong one, or a number between them.

    Raises:
        DataError: the field is missing or of another kind; the message begins with ``where``.
    """
    label: Any = row.get(field)
    if not (isinstance(label, bool) or _is_number(label, 0.0, 1.0)):
        raise DataError(f"{where}{field!r} is {label!r:.80}; it must be true or false, or lie in [0, 1]")
    return float(label)


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def answers_of_episode(episode: Episode, where: str) -> list[Answer]:
    """Return the answers of an episode that did not fail; see :func:`read_answers`.

    Raises:
        DataError: nothing says whether the answers are right; the message begins with ``where``.
    """
    rows = episode.rows()
    turns = [turn for row in rows for turn in row.turns]
    if turns and all(SCORE in turn.components for turn in turns):
        return [answer for row in rows for answer in _scored_answers(row, episode, where)]
    num_agents = len(episode.trajectories) if turns else 0
    if num_agents != 1:
        raise DataError(
            f"{where}: {num_agents} agents of {episode.task.environment!r} acted, and no {SCORE!r} says "
            "which of them was right; collect the answers of a single agent"
        )
    if episode.success is None:
        raise DataError(
            f"{where}: 'success' is null, so nothing says whether the answer is right; collect in an environment that "
            "judges, and with a limit of turns and tokens that lets it"
        )
    replies = [message.content for message in rows[-1].messages if message.role == "assistant"]
    return [_answer(rows[0], replies[-1] if replies else "", float(episode.success), episode, where)]


def _scored_answers(row: Trajectory, episode: Episode, where: str) -> list[Answer]:
    replies = [row.messages[index].content for index in row.replies]
    scores = [turn.components[SCORE] for turn in row.turns]
    if len(replies) != len(scores):
        turns = counted(len(scores), "turn")
        raise DataError(f"{where}: agent {row.agent!r} has {turns}, and replies in its messages: {len(replies)}")
    for score in scores:
        if not _is_number(score, 0.0, 1.0):
            raise DataError(f"{where}: a turn's {SCORE!r} is {score!r}; it must lie in [0, 1]")
    return [_answer(row, text, float(score > 0.5), episode, where) for text, score in zip(replies, scores, strict=True)]


def _answer(row: Trajectory, text: str, correct: float, episode: Episode, where: str) -> Answer:
    question = question_to(episode, row.agent) or ""
    if not question.strip():
        raise DataError(f"{where}: agent {row.agent!r} has no user message, so there is no question to its answer")
    return Answer(question, text, correct, episode.task.key, episode.metrics.get("temperature"))
