"""Each check of the contract catches an environment that is broken in just that way."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from mrlm_environments import CoordinationGame, MathEnvironment

from mrlm_pl.environment import DatasetTasks, Environment, Observations, Outcome, SingleAgentEnvironment, Step
from mrlm_pl.environment_check import check_environment
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import EnvironmentContractError


class Sound(SingleAgentEnvironment):
    """Keeps the contract; the broken ones below differ from it in one point each."""

    name = "sound"

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"text": f"{split} {n}", "answer": str(n)} for n in range(10)])

    def begin(self, task: Task) -> str:
        self.answer = task.data["answer"]
        return str(task.data["text"])

    def reply(self, message: Message) -> Outcome:
        right = message.content == self.answer
        return Outcome({"right": float(right)}, success=right)

    def gold(self, task: Task) -> Mapping[str, list[str]] | None:
        return {"agent": [task.data["answer"]]}


class SharesTasks(Sound):
    def tasks(self, split: str) -> DatasetTasks:
        return super().tasks("any")


class Draws(Sound):
    def begin(self, task: Task) -> str:
        return f"{super().begin(task)} {random.random()}"


class DrawsTasks(Sound):
    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"text": str(random.random()), "answer": "1"} for _ in range(10)])


class Shares(Sound):
    answers: ClassVar[list[str]] = []

    def begin(self, task: Task) -> str:
        self.answers.append(task.data["answer"])
        return f"{super().begin(task)} {len(self.answers)}"


class Crashes(Sound):
    def reply(self, message: Message) -> Outcome:
        return Outcome({"number": float(message.content)})


class PaysTheSilent(Sound):
    def reply(self, message: Message) -> Outcome:
        return Outcome({"quiet": 2.0 if message.content != self.answer else 1.0})


class GoesOn(Sound):
    def reply(self, message: Message) -> Outcome:
        return Outcome(observation="Again")


class Unordered(Environment):
    name = "unordered"

    def tasks(self, split: str) -> DatasetTasks:
        return Sound().tasks(split)

    def reset(self, task: Task) -> Observations:
        return {"agent": [Message("user", task.data["text"])]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(rewards={"agent": 1.0}, done=True, stop_reason="end")


class BadSum(Unordered):
    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(rewards={"agent": 1.0}, components={"agent": {"half": 0.5}}, done=True, stop_reason="end")


class ClosesOnce(Sound):
    def close(self) -> None:
        del self.handle

    def copy(self) -> Environment:
        copied = super().copy()
        copied.handle = 1  # type: ignore[attr-defined]
        return copied


class Async(Unordered):
    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        return super().reset(task)


@pytest.mark.parametrize(
    "environment", [Sound(), MathEnvironment(), MathEnvironment(max_attempts=3), CoordinationGame()]
)
def test_sound_environments_pass(environment: Environment) -> None:
    report = check_environment(environment)
    report.raise_on_failure()
    assert report.passed


@pytest.mark.parametrize(
    ("environment", "failing", "message"),
    [
        (SharesTasks(), "splits are disjoint", "also in split 'train'"),
        (Draws(), "determinism", "went otherwise"),
        (DrawsTasks(), "task data", "another task when it is read again"),
        (Shares(), "copies are independent", "copies share state"),
        (Crashes(), "hostile replies", "ValueError"),
        (PaysTheSilent(), "best replies", "the best replies earn 1.0"),
        (GoesOn(), "determinism", "did not end within 64 turns"),
        (Unordered(), "order of calls", "step before reset was accepted"),
        (BadSum(), "determinism", "sum to 0.5"),
        (ClosesOnce(), "close", "AttributeError"),
    ],
)
def test_each_check_catches_its_fault(environment: Environment, failing: str, message: str) -> None:
    report = check_environment(environment)
    found = {check.name: check.message for check in report.checks if not check.passed}
    assert failing in found
    assert message in found[failing]
    with pytest.raises(EnvironmentContractError, match=environment.name):
        report.raise_on_failure()


def test_async_methods_are_accepted() -> None:
    found = {check.name for check in check_environment(Async()).checks if not check.passed}
    assert found == {"order of calls"}, "it has no TurnOrder, and nothing else is wrong with it"


def test_data_that_is_not_json_is_found() -> None:
    class Sets(Sound):
        def tasks(self, split: str) -> Any:
            return DatasetTasks(self.name, split, [{"text": split, "answer": "1", "extra": {1, 2}}])

    found = {check.name: check.message for check in check_environment(Sets()).checks if not check.passed}
    assert "not JSON serializable" in found["task data"]
