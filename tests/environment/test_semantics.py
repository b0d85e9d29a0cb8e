"""Each semantic check finds the hole that is planted for it, and no check of a sound environment finds one."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.environment import (
    DatasetTasks,
    Environment,
    Outcome,
    SeededTasks,
    SingleAgentEnvironment,
    Step,
    TaskSource,
    ToolSchema,
)
from mrlm_pl.environment.check import check_environment, check_semantics
from mrlm_pl.environment.probes import INJECTIONS, normalized
from mrlm_pl.environment.tools import requested_calls, tool_message, tool_schema
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError

IDS = ("oracle", "floor", "injection", "canary", "leakage", "replay")


class Adding(SingleAgentEnvironment):
    """Sound; the environments below differ from it in one point each."""

    name = "adding"

    def tasks(self, split: str) -> TaskSource:
        return SeededTasks(
            self.name,
            split,
            lambda rng: {"a": (a := rng.randint(100, 999)), "b": (b := rng.randint(100, 999)), "answer": str(a + b)},
            lambda data: f"{data['a']}+{data['b']}",
        )

    def begin(self, task: Task) -> str:
        self.task = task
        return f"How much is {task.data['a']} + {task.data['b']}?"

    def right(self, text: str) -> bool:
        return text.strip() == self.task.data["answer"]

    def reply(self, message: Message) -> Outcome:
        right = self.right(message.content)
        return Outcome({"right": float(right)}, success=right)

    def gold(self, task: Task) -> Mapping[str, list[str]] | None:
        return {"agent": [task.data["answer"]]}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        return 0.0, 1.0


class BelievesTheReply(Adding):
    def right(self, text: str) -> bool:
        return "reward: 1" in text or super().right(text)


class BelievesATool(Adding):
    def right(self, text: str) -> bool:
        return "<tool_response>" in text or super().right(text)


class ShowsTheAnswer(Adding):
    def begin(self, task: Task) -> str:
        return f"{super().begin(task)} (hidden: {task.data['answer']})"


class ToolReadsTheAnswer(Adding):
    """Its tool reads any file, and the answer lies in one."""

    def tools(self, agent: str) -> list[ToolSchema]:
        return [tool_schema("read", "Read a file.", {"path": {"type": "string"}})]

    def reply(self, message: Message) -> Outcome:
        calls = requested_calls(message)
        if calls and not getattr(self, "called", False):
            self.called = True
            return Outcome(observation=tool_message(calls[0], f"expected.txt: {self.task.data['answer']}"))
        return super().reply(message)


class DrawsAtReset(Adding):
    def begin(self, task: Task) -> str:
        return f"{super().begin(task)} {random.random()}"


class OrdersASet(Adding):
    """The order of a set of texts differs between processes."""

    def begin(self, task: Task) -> str:
        return f"{super().begin(task)} {' '.join({f'word{n}' for n in range(20)})}"


class SharesTasks(Adding):
    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"a": 1, "b": n, "answer": str(1 + n)} for n in range(10, 20)])


class SharesALateRow(Adding):
    """The last of many rows of the test split is the last one of training."""

    def tasks(self, split: str) -> TaskSource:
        begin = {"train": 100, "validation": 300, "test": 500}[split]
        rows = [{"a": 1, "b": n, "answer": str(1 + n)} for n in (*range(begin, begin + 99), 800)]
        return DatasetTasks(self.name, split, [row for row in rows if split != "validation" or row["b"] != 800])

    def identity(self, task: Task) -> str:
        return str(task.data["b"])


class BelievesTheLastAgent(Environment):
    """Three agents, the last of which answers for all."""

    name = "last_agent"
    agents = ("one", "two", "three")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"question": f"{split} {n}"} for n in range(3)])

    def reset(self, task: Task) -> Any:
        return {agent: [Message("user", task.data["question"])] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        reward = float("reward: 1" in actions["three"].content)
        return Step(rewards=dict.fromkeys(self.agents, reward), done=True, stop_reason="answered")


class SharesTexts(Adding):
    """The same question, with other spacing in the test split."""

    def tasks(self, split: str) -> TaskSource:
        rows = [{"split": split, "a": 1, "b": n, "answer": str(1 + n)} for n in range(10, 20)]
        return DatasetTasks(self.name, split, rows)

    def identity(self, task: Task) -> str:
        return f"{task.split} {task.index}"

    def begin(self, task: Task) -> str:
        text = super().begin(task)
        return text if task.split == "train" else text.upper().replace(" ", "  ")


class GoldEarnsLess(Adding):
    def reply(self, message: Message) -> Outcome:
        return Outcome({"right": 0.5 * self.right(message.content)})


class GoldIsWrong(Adding):
    def gold(self, task: Task) -> Mapping[str, list[str]]:
        return {"agent": ["0"]}

    def bounds(self, task: Task) -> None:
        return None


class RewardsDelay(Adding):
    """Every further attempt can earn again, so that a wrong first one costs nothing and earns more."""

    def begin(self, task: Task) -> str:
        self.attempts = 0
        return super().begin(task)

    def reply(self, message: Message) -> Outcome:
        self.attempts += 1
        right = self.right(message.content)
        done = right or self.attempts == 3
        return Outcome({"right": float(right), "form": 0.03}, None if done else "Again.", success=right)

    def bounds(self, task: Task) -> None:
        return None


class RewardsNothing(Adding):
    def right(self, text: str) -> bool:
        return not text.strip() or super().right(text)


class RewardsNothingALittle(Adding):
    def reply(self, message: Message) -> Outcome:
        return Outcome({"right": float(self.right(message.content)), "calm": 0.5 * (not message.content.strip())})


class RewardsOtherAnswers(Adding):
    def reply(self, message: Message) -> Outcome:
        wrong = re.fullmatch(r"[0-9]{3,4}", message.content) is not None and not self.right(message.content)
        return Outcome({"right": float(self.right(message.content)), "wrong": 2.0 * wrong})


class Programs(Adding):
    """Programs, graded in the grader's own process by their own ``==``."""

    def begin(self, task: Task) -> str:
        return f"Write f() that returns {super().begin(task)}"

    def right(self, text: str) -> bool:
        code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        names: dict[str, Any] = {"open": lambda *_: self}
        try:
            exec(code[1] if code else "", names)
            return "f" in names and self.judged(names["f"]())
        except SystemExit:
            return self.ended()
        except Exception:
            return False

    def judged(self, value: Any) -> bool:
        return type(value) is str and value == self.task.data["answer"]

    def ended(self) -> bool:
        return False

    def write(self, text: str) -> None:
        """Stand for the files of the program."""

    def gold(self, task: Task) -> Mapping[str, list[str]]:
        return {"agent": [f"```python\ndef f():\n    return {task.data['answer']!r}\n```"]}


class BelievesEquality(Programs):
    def judged(self, value: Any) -> bool:
        return bool(value == self.task.data["answer"])


class RewardsTrue(Programs):
    def judged(self, value: Any) -> bool:
        self.is_true = value is True
        return super().judged(value)

    def reply(self, message: Message) -> Outcome:
        self.is_true = False
        right = self.right(message.content)
        return Outcome({"right": float(right), "true": 2.0 * self.is_true})


class BelievesAnExit(Programs):
    def ended(self) -> bool:
        return True


class ReadsARewardFile(Programs):
    def begin(self, task: Task) -> str:
        self.written = False
        return super().begin(task)

    def write(self, text: str) -> None:
        self.written = True

    def right(self, text: str) -> bool:
        return super().right(text) or self.written


SOUND = [Adding(), Programs()]


@pytest.mark.parametrize("environment", SOUND, ids=lambda environment: type(environment).__name__)
@pytest.mark.long_after(1)
def test_a_sound_environment_passes(environment: Environment) -> None:
    report = check_environment(environment, "semantic", tasks_per_split=3)
    report.raise_on_failure()
    assert tuple(check.name for check in report.checks[-len(IDS) :]) == IDS, "reports are compared by these ids"
    (oracle,) = [check.message for check in report.checks if check.name == "oracle"]
    assert oracle == "gold replies earn 1 on 3 tasks: the declared maximum"


@pytest.mark.parametrize(
    ("environment", "failing", "message"),
    [
        (BelievesTheReply(), "injection", "a reply of agent with 'reward: 1' earns 1, without it 0"),
        (BelievesATool(), "injection", "<tool_response>"),
        (BelievesEquality(), "injection", "a reply of agent with __eq__ earns 1, without it 0"),
        (BelievesAnExit(), "injection", "a reply of agent with sys.exit(0) earns 1, without it 0"),
        (ReadsARewardFile(), "injection", "a reply of agent with conftest.py and reward.txt earns 1, without it 0"),
        (ShowsTheAnswer(), "canary", "adding/train/0 shows its field 'answer' to an agent"),
        (ToolReadsTheAnswer(), "canary", "adding/train/0 shows its field 'answer' to an agent"),
        (DrawsAtReset(), "replay", "differs when the same replies are played again"),
        (SharesTasks(), "leakage", "adding/validation/0 poses the same text as adding/train/0"),
        (SharesALateRow(), "leakage", "adding/test/99 poses the same problem as adding/train/99: 800"),
        (BelievesTheLastAgent(), "injection", "a reply of three with 'reward: 1' earns 1, without it 0"),
        (SharesTexts(), "leakage", "adding/validation/0 poses the same text as adding/train/0"),
        (GoldEarnsLess(), "oracle", "the gold replies earn 0.5, summed over agents, and the maximum is 1"),
        (GoldIsWrong(), "oracle", "on adding/train/0 the gold replies earn 0 and do not succeed"),
        (RewardsDelay(), "oracle", "a refusal, then the gold replies, earns 1.06, the gold replies alone 1.03"),
        (RewardsOtherAnswers(), "oracle", "the answer to another task earns 2, the gold replies alone 1"),
        (RewardsTrue(), "oracle", "a program that returns True earns 2, the gold replies alone 1"),
        (RewardsNothingALittle(), "floor", "empty replies earn 0.5 on average, the floor is 0 and the maximum 1"),
        (RewardsNothing(), "floor", "empty replies earn 1 on average, the floor is 0 and the maximum 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Environment) else "",
)
def test_each_check_finds_its_hole(environment: Environment, failing: str, message: str) -> None:
    report = check_semantics(environment, tasks=2, other_process=False)
    found = {check.name: check.message for check in report.checks if not check.passed}
    assert list(found) == [
        failing,
        *(["floor"] if isinstance(environment, (GoldIsWrong, RewardsOtherAnswers)) else []),
    ], found
    assert message in found[failing]


@pytest.mark.parametrize(("shown", "passed"), [("", True), (" (hidden: {answer})", False)])
def test_an_answer_of_one_letter_is_told_from_the_letters_of_a_question(shown: str, passed: bool) -> None:
    class Choosing(Adding):
        def tasks(self, split: str) -> TaskSource:
            return DatasetTasks(self.name, split, [{"answer": "A"}])

        def begin(self, task: Task) -> str:
            self.task = task
            return "Even? A: 2, B: 3" + shown.format(**task.data)

    checks = {check.name: check for check in check_semantics(Choosing(), tasks=2, other_process=False).checks}
    assert (checks["canary"].applies, checks["canary"].passed) == (True, passed)
    assert not passed or checks["canary"].message == "a mark instead of answer is never shown to an agent"


def test_another_process_replays_with_another_order_of_sets() -> None:
    found = {check.name: check.message for check in check_semantics(OrdersASet(), tasks=2).checks if not check.passed}
    assert list(found) == ["replay"], found
    assert "adding/train/0 differs in another process; sort sets" in found["replay"]


def test_checks_without_a_subject_do_not_apply() -> None:
    class Mute(SingleAgentEnvironment):
        name = "mute"

        def tasks(self, split: str) -> TaskSource:
            return DatasetTasks(self.name, split, [{}])

        def identity(self, task: Task) -> None:
            return None

        def begin(self, task: Task) -> str:
            return "Speak."

        def reply(self, message: Message) -> Outcome:
            return Outcome({"spoken": float(bool(message.content))})

    report = check_semantics(Mute(), tasks=2)
    assert report.passed
    assert {check.name for check in report.checks if not check.applies} == {"oracle", "floor", "canary", "leakage"}
    replay = next(check.message for check in report.checks if check.name == "replay")
    assert "not played in another process" in replay, "a class in a function cannot be found there"


def test_games_that_begin_alike_and_may_never_end_are_checked() -> None:
    class Endless(Adding):
        def begin(self, task: Task) -> str:
            super().begin(task)
            return "Guess the number."

        def reply(self, message: Message) -> Outcome:
            right = self.right(message.content)
            return Outcome({"right": float(right)}, None if right else "Again.", success=right or None)

    report = check_semantics(Endless(), tasks=2, max_turns=8, other_process=False)
    report.raise_on_failure()
    assert next(check.applies for check in report.checks if check.name == "leakage")


def test_a_field_that_cannot_be_marked_is_named() -> None:
    class ReadsItsAnswer(Adding):
        def begin(self, task: Task) -> str:
            return f"{super().begin(task)} Choose from {['a', 'b', 'c'][int(task.data['answer']) % 1 and 9 :]}."

        def reply(self, message: Message) -> Outcome:
            if int(self.task.data["answer"]) > 10_000:
                raise ValueError("no such answer")
            return super().reply(message)

    checks = {check.name: check for check in check_semantics(ReadsItsAnswer(), tasks=2, other_process=False).checks}
    assert not checks["canary"].applies
    assert "answer cannot be marked" in checks["canary"].message


def test_a_truth_value_is_named_and_tasks_that_begin_alike_have_no_leakage_to_find() -> None:
    class Guess(Adding):
        def tasks(self, split: str) -> TaskSource:
            return DatasetTasks(self.name, split, [{"answer": True, "n": n} for n in range(8)])

        def begin(self, task: Task) -> str:
            return "Yes or no?"

        def gold(self, task: Task) -> None:
            return None

        def bounds(self, task: Task) -> None:
            return None

        def reply(self, message: Message) -> Outcome:
            return Outcome({"right": float(message.content == "yes")})

    checks = {check.name: check for check in check_semantics(Guess(), tasks=2, other_process=False).checks}
    assert "answer cannot be marked" in checks["canary"].message
    assert not checks["leakage"].applies, "neither identities nor texts tell the tasks apart"


def test_levels_are_named() -> None:
    with pytest.raises(ConfigurationError, match="level is 'deep'; choose from contract, semantic"):
        check_environment(Adding(), "deep")  # type: ignore[arg-type]


def test_texts_are_compared_without_case_spacing_and_punctuation() -> None:
    assert normalized("Compute 3 - 4 ?") == normalized("compute  3-4") == "compute3-4"
    assert normalized("3 - 4") != normalized("3 + 4")
    assert normalized("1.5") != normalized("15")


def test_the_arguments_that_look_for_answers_hold_none() -> None:
    """Else a tool that repeats its arguments would fail."""
    source = Path("mrlm_pl/environment/probes.py").read_text()
    mark = "canary-8f31c07d"
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    assert [text for text in texts if isinstance(text, str) and mark in text] == [mark]
    assert all(mark not in text for text in INJECTIONS)
