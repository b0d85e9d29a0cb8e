"""Mathematics with a number as answer: generated problems of five difficulties, or a data set in GSM8K's format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from mrlm_environments.answers import is_right, read_answer, vote
from mrlm_environments.data_tasks import DataTasks, opening
from mrlm_environments.math.problems import KINDS, MAX_DIFFICULTY, Kind, generate_problem
from mrlm_pl.answers.numbers import extract_answer, number_value, shows_steps
from mrlm_pl.environment import Message, Outcome, SingleAgentEnvironment, Task, TaskSource
from mrlm_pl.errors import DataError
from mrlm_pl.settings import NonNegativeFloat, PositiveInt, some_of, whole_range

CORRECT, UNPARSED = 1.0, -0.3
RETRY = "That is not correct. Try again."


class MathEnvironment(SingleAgentEnvironment):
    r"""One problem, one number as answer.

    A right answer earns 1.0, a wrong one 0 and a reply without an answer -0.3, for each attempt.
    :func:`mrlm_environments.answers.read_answer` finds the answer in a reply. Answers are compared by value.

    Args:
        difficulty: lowest and highest difficulty of generated problems, from 1 to 5; each is equally likely.
        kinds: kinds of generated problems; None is all of them.
        data: rows that replace the generated problems, with ``question`` and ``answer`` (a number, or text that ends in
            ``#### N``): a file or a hub name, or a mapping from splits to these; see
            :func:`mrlm_pl.environment.rows.read_split`.
        steps_bonus: added to the reward of a right answer whose reply shows a true equation on the question's numbers.
        max_attempts: replies that the agent may give; after a wrong one it learns only that it was wrong.
        instruction: text after the question, on its own line.
        system_prompt: system message before the question.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "math"
    client_settings = ("difficulty", "kinds", "steps_bonus", "max_attempts", "instruction", "system_prompt")
    forks = True

    def __init__(
        self,
        difficulty: tuple[int, int] = (1, 3),
        kinds: list[Kind] | None = None,
        data: str | dict[str, str] | None = None,
        steps_bonus: NonNegativeFloat = 0.0,
        max_attempts: PositiveInt = 1,
        instruction: str = "",
        system_prompt: str = "",
    ) -> None:
        self.difficulty = whole_range(1, MAX_DIFFICULTY, "math: ", difficulty=difficulty)
        self.kinds = some_of(KINDS, "math: ", kinds=kinds)
        self.steps_bonus, self.max_attempts = steps_bonus, max_attempts
        self.instruction, self.system_prompt = instruction, system_prompt
        self._tasks = DataTasks(self.name, data)

    def tasks(self, split: str) -> TaskSource:
        """Return generated problems without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row lacks a field, or its answer is not a number and does not end in ``#### N``.
            ConfigurationError: the split is unknown or empty.
        """
        return self._tasks.source(split, ("question", "answer"), worked_problem, generate=self._generate, key="key")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the worked solution, which ends in the right answer; None where it would miss the bonus for steps."""
        solution = task.data["solution"]
        if self.steps_bonus and not shows_steps(solution, task.data["question"], task.data["answer"]):
            return None
        return {self.agents[0]: [solution]}

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the returns of a wrong and of a right answer; see :meth:`Environment.bounds`."""
        return 0.0, CORRECT + self.steps_bonus

    def majority(self, task: Task, replies: Sequence[str]) -> bool:
        """Return whether the number that most replies give is right; see :meth:`Environment.majority`."""
        chosen = vote([read_answer(reply, "math", task.data["question"]) for reply in replies], "math")
        return is_right(chosen, task.data["answer"], "math")

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question; see :meth:`SingleAgentEnvironment.begin`."""
        self._task, self._attempts = task, 0
        return opening(task.data["question"], self.system_prompt, self.instruction)

    def reply(self, message: Message) -> Outcome:
        """Judge one attempt; see :meth:`SingleAgentEnvironment.reply`."""
        self._attempts += 1
        data, text = self._task.data, message.final_text
        answer = read_answer(text, "math", data["question"])
        parsed, correct = answer is not None, is_right(answer, data["answer"], "math")
        components = {"correct": CORRECT * correct, "unparsed": 0.0 if parsed else UNPARSED}
        if self.steps_bonus:
            components["steps"] = self.steps_bonus * (correct and shows_steps(text, data["question"], data["answer"]))
        last = correct or self._attempts == self.max_attempts
        return Outcome(
            components,
            observation=None if last else RETRY,
            stop_reason="answered" if parsed else "unparsed",
            success=correct,
            metrics={"parsed": float(parsed)},
        )

    def _generate(self, rng: Random) -> Mapping[str, Any]:
        kind, level = rng.choice(self.kinds), rng.randint(*self.difficulty)
        return {**vars(generate_problem(rng, kind, level)), "kind": kind, "difficulty": level}


def worked_problem(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Return ``question``, ``answer`` (alone or behind ``####``) and ``solution`` of a row with GSM8K's fields.

    Args:
        row: has ``question`` and ``answer``.

    Raises:
        DataError: they are not strings, or the answer is not a number and does not end in ``#### N``.

    >>> worked_problem({"question": "2+2?", "answer": "2+2=4\n#### 4"})["answer"]
    '4'
    >>> worked_problem({"question": "2+2?", "answer": "4"})["answer"]
    '4'
    """
    question, solution = row["question"], row["answer"]
    if isinstance(solution, int) and not isinstance(solution, bool):
        solution = str(solution)
    answer = solution if isinstance(solution, str) else None
    if answer is not None and number_value(answer) is None:
        answer = extract_answer(answer) if "####" in answer else None
    if not isinstance(question, str) or answer is None or number_value(answer) is None:
        raise DataError(
            f"the question is {question!r:.80} and the answer {solution!r:.80}; they must be texts, and the answer "
            "must be a number or end in '#### N'"
        )
    return {"question": question, "answer": answer, "solution": solution}
