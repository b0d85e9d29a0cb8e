"""An agent poses problems, and others solve them: self-play without data, as in Absolute Zero and R-Zero."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from random import Random
from typing import Any, Literal, NamedTuple

from mrlm_environments.answers import is_right, read_answer, vote
from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.math.problems import KINDS, MAX_DIFFICULTY, decimal_text, generate_problem
from mrlm_environments.toolbox.calculator import evaluate
from mrlm_pl.answers.numbers import number_value
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.environment.tools import ToolError
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError, name_and_place
from mrlm_pl.settings import PositiveInt, whole_range

PROPOSER = "proposer"
INVALID = -1.0
MAX_CHARACTERS = 1_000
"""Length of the longest problem; an expression is searched for in as much of a reply."""

_EXPRESSION = re.compile(r"\(*\d+(?:\.\d+)?\)*(?:\s*[-+*/]\s*\(*\d+(?:\.\d+)?\)*)+")
_OPERATOR = re.compile(r"(?<=[\d)])\s*([-+*/])\s*")


class Problem(NamedTuple):
    """A problem that the proposer posed.

    Args:
        question: text that the solvers read.
        answer: the number that is right; None takes the number that most solvers give.
    """

    question: str
    answer: str | None = None


def read_expression(reply: str) -> Problem | None:
    """Return the first arithmetic expression of a reply as a problem with its value.

    None if there is none, or its value has more digits than an answer may have.

    >>> read_expression("Try (2+3)*4 = ?"), read_expression("7"), read_expression("1/0")
    (Problem(question='What is (2 + 3) * 4?', answer='20'), None, None)
    """
    found = _EXPRESSION.search(reply[:MAX_CHARACTERS])
    if not found:
        return None
    try:
        answer = decimal_text(Fraction(evaluate(found.group())))
    except ToolError:
        return None
    if number_value(answer) is None:
        return None
    return Problem("What is " + _OPERATOR.sub(r" \1 ", found.group()) + "?", answer)


def read_text(reply: str) -> Problem | None:
    """Return the whole reply as a problem whose answer is unknown; None for an empty one.

    >>> read_text(" Ann has 3 eggs. Ben has 4. How many? "), read_text(" ")
    (Problem(question='Ann has 3 eggs. Ben has 4. How many?', answer=None), None)
    """
    return Problem(reply.strip()) if reply.strip() else None


def learnability(rate: float) -> float:
    """Return ``1 - rate`` for a problem that some solvers but not all solve, else 0.

    Source: arXiv 2505.03335 (Absolute Zero).

    >>> learnability(0.25), learnability(0.0), learnability(1.0)
    (0.75, 0.0, 0.0)
    """
    return 1.0 - rate if 0.0 < rate < 1.0 else 0.0


def uncertainty(rate: float) -> float:
    """Return ``1 - 2 |rate - 1/2|``: 1 where half of the solvers are right.

    Source: arXiv 2508.05004 (R-Zero).

    >>> uncertainty(0.25), uncertainty(0.5), uncertainty(1.0)
    (0.5, 1.0, 0.0)
    """
    return 1.0 - 2.0 * abs(rate - 0.5)


PROBLEMS: Mapping[str, Callable[[str], Problem | None]] = {"expression": read_expression, "text": read_text}
REWARDS: Mapping[str, Callable[[float], float]] = {"learnability": learnability, "uncertainty": uncertainty}


class ProposerEnvironment(Environment):
    """``proposer`` poses a problem; ``solver_1``, ``solver_2`` and so on then answer it, each without the others.

    A solver earns 1 for the right number, else 0. The proposer's reward depends on the rate of solvers that are right.
    For a reply that poses no problem, one of more than 1,000 characters or the one that it was shown, it is -1, and the
    solvers are not asked.

    Args:
        solvers: number of solvers.
        reward: the proposer's: ``learnability`` (:func:`learnability`), ``uncertainty`` (:func:`uncertainty`), or a
            function of the rate, in a configuration its import path.
        problems: how a reply poses a problem: ``expression`` (:func:`read_expression`) has a value; ``text``
            (:func:`read_text`) is any text, and the number that most solvers give counts as right; or a function of the
            reply that returns a :class:`Problem`, or None where there is none.
        prompt: text before the example.
        data: rows with ``question`` that replace the generated examples: a file or a hub name, or a mapping from splits
            to these; see :func:`mrlm_pl.environment.rows.read_split`.
        difficulty: lowest and highest difficulty of the generated examples, from 1 to 5.
        instruction: text after the problem, on its own line, for the solvers.

    Raises:
        ConfigurationError: a value is out of its range, or the reward does not take a rate or returns no number.
    """

    name = "proposer"
    client_settings = ("prompt", "difficulty", "instruction")
    forks = True

    def __init__(
        self,
        solvers: PositiveInt = 4,
        reward: Literal["learnability", "uncertainty"] | Callable[[float], float] = "learnability",
        problems: Literal["expression", "text"] | Callable[[str], Problem | None] = "expression",
        prompt: str = "Write a new problem like this one.",
        data: str | dict[str, str] | None = None,
        difficulty: tuple[int, int] = (1, 1),
        instruction: str = "",
    ) -> None:
        self.agents = (PROPOSER, *(f"solver_{number}" for number in range(1, solvers + 1)))
        self.reward = REWARDS[reward] if isinstance(reward, str) else reward
        try:
            float(self.reward(0.5))
        except TypeError as error:
            function, place = name_and_place(self.reward)
            raise ConfigurationError(
                f"{self.name}: the reward {function} must take a rate from 0 to 1 and return a number: {error}{place}"
            ) from error
        self.problems = PROBLEMS[problems] if isinstance(problems, str) else problems
        self.prompt, self.instruction = prompt, instruction
        self.difficulty = whole_range(1, MAX_DIFFICULTY, f"{self.name}: ", difficulty=difficulty)
        self._tasks = DataTasks(self.name, data)

    def tasks(self, split: str) -> TaskSource:
        """Return generated examples without end, or those of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row has no question.
            ConfigurationError: the split is unknown or empty.
        """
        return self._tasks.source(split, ("question",), _example, generate=self._generate, key="key")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return an expression and its value; None where problems are read in another way."""
        if self.problems is not read_expression:
            return None
        return {agent: ["999 + 1"] if agent == PROPOSER else ["1000"] for agent in self.agents}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return the returns of an invalid problem and of one that all solve; None with a reward of the user's."""
        return (INVALID, float(len(self.agents) - 1)) if self.reward in REWARDS.values() else None

    def reset(self, task: Task) -> Observations:
        """Show the example to the proposer; see :meth:`Environment.reset`."""
        self._example, self._problem = task.data["question"].strip(), Problem("")
        return {PROPOSER: (Message("user", f"{self.prompt}\n{self._example}"),)}

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Pose the problem to the solvers, or reward all agents; see :meth:`Environment.step`.

        Raises:
            EnvironmentContractError: the user's function returned no problem whose answer is a number or unknown.
        """
        if PROPOSER not in actions:
            return self._solved([actions[agent].final_text for agent in self.agents[1:]])
        problem = self.problems(actions[PROPOSER].final_text)
        if problem is not None and not (
            isinstance(problem, Problem) and (problem.answer is None or number_value(problem.answer) is not None)
        ):
            name, place = name_and_place(self.problems)
            raise EnvironmentContractError(
                f"{name} returned {problem!r:.200}; return None for no problem, or a Problem whose answer is a number "
                f"as text or unknown (None){place}"
            )
        repeated = problem is not None and problem.question == self._example
        if problem is None or repeated or len(problem.question) > MAX_CHARACTERS:
            reason = "repeated" if repeated else "invalid"
            components = {PROPOSER: {reason: INVALID}}
            return Step(components=components, done=True, stop_reason=reason, metrics={"valid": 0.0})
        self._problem = problem
        text = f"{problem.question}\n{self.instruction}" if self.instruction else problem.question
        return Step(dict.fromkeys(self.agents[1:], (Message("user", text),)))

    def _solved(self, replies: Sequence[str]) -> Step:
        question, expected = self._problem
        answers = [read_answer(reply, "math", question) for reply in replies]
        most = vote(answers, "math")
        right = [is_right(answer, expected or most or "", "math") for answer in answers]
        rate = sum(right) / len(right)
        components = {agent: {"correct": float(one)} for agent, one in zip(self.agents[1:], right, strict=True)}
        return Step(
            components={PROPOSER: {"challenge": float(self.reward(rate))}, **components},
            done=True,
            stop_reason="answered",
            success=is_right(most, expected, "math") if expected else None,
            metrics={"valid": 1.0, "solved": float(sum(right)), "solved_of": float(len(right))},
        )

    def _generate(self, rng: Random) -> Mapping[str, Any]:
        made = generate_problem(rng, rng.choice(KINDS), rng.randint(*self.difficulty))
        return {"question": made.question, "key": made.key}


def _example(row: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(row["question"], str) or not row["question"].strip():
        raise DataError(f"the question is {row['question']!r:.80}; it must be a text")
    return {"question": row["question"]}
