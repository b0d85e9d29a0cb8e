"""Each check of the contract catches an environment that is broken in just that way."""

from __future__ import annotations

import asyncio
import inspect
import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from mrlm_environments import CoordinationGame, MathEnvironment

from mrlm_pl.environment import (
    SPLITS,
    DatasetTasks,
    Environment,
    Observations,
    Outcome,
    SeededTasks,
    SingleAgentEnvironment,
    Step,
    ToolSchema,
)
from mrlm_pl.environment.check import Check, check_environment
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError


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


class HasABadTool(Sound):
    def tools(self, agent: str) -> list[ToolSchema]:
        return [ToolSchema("add", "", {"type": "object", "properties": {"a": {"type": "float"}}})]


class Exits(Sound):
    def reply(self, message: Message) -> Outcome:
        raise SystemExit(3)


class Waits(Sound):
    def reply(self, message: Message) -> Outcome:
        time.sleep(5)
        return super().reply(message)


class WaitsAndCatches(Sound):
    def reply(self, message: Message) -> Outcome:
        with suppress(Exception):
            time.sleep(5)
        return super().reply(message)


class UsesTheAlarm(Sound):
    """Has its own deadline, by a handler that is set once."""

    def begin(self, task: Task) -> str:
        signal.signal(signal.SIGALRM, self.stop)
        return super().begin(task)

    def stop(self, *_: object) -> None:
        raise InterruptedError

    def reply(self, message: Message) -> Outcome:
        with suppress(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            time.sleep(1)
        return super().reply(message)


class WaitsInLoop(Sound):
    async def step(self, actions: Mapping[str, Message]) -> Step:
        await asyncio.sleep(5)
        return Step({}, {})


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


class Unordered(Environment, proxy=True):
    name = "unordered"

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"text": f"{split} {n}", "answer": str(n)} for n in range(10)])

    def reset(self, task: Task) -> Observations:
        return {"agent": [Message("user", task.data["text"])]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(rewards={"agent": 1.0}, done=True, stop_reason="end")


class BadSum(Unordered):
    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(rewards={"agent": 1.0}, components={"agent": {"half": 0.5}}, done=True, stop_reason="end")


class ForksBadly(Sound):
    forks = True

    def begin(self, task: Task) -> str:
        self.source = random.Random(0)
        self.said = 0
        return super().begin(task)

    def reply(self, message: Message) -> Outcome:
        self.said += 1
        return Outcome({"drawn": self.source.random()}, "Again" if self.said < 3 else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Environment:
        made = type(self)()
        made.__dict__.update(self.__dict__, source=random.Random(1))
        return made


class HoldsALock(Sound):
    forks = True

    def begin(self, task: Task) -> str:
        self.lock = threading.Lock()
        return super().begin(task)


class OtherName(Sound):
    def tasks(self, split: str) -> Any:
        return SeededTasks("osund", split, lambda rng: {"text": str(rng.random())}, lambda data: data["text"])


class ListOfTasks(Sound):
    def tasks(self, split: str) -> Any:
        return [{"text": "1"}]


class Text(Sound):
    def reset(self, task: Task) -> Any:
        return {"agent": "Say it"}


class PlainText(Sound):
    def reset(self, task: Task) -> Any:
        return "Say it"


class ReturnsANumber(Sound):
    def reply(self, message: Message) -> Any:
        return 1.0


class ComponentsAreANumber(Sound):
    def reply(self, message: Message) -> Any:
        return Outcome(1.0)  # type: ignore[arg-type]


class RewardIsText(Sound):
    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(rewards={"agent": "much"}, done=True, stop_reason="end")  # type: ignore[dict-item]


class MetricIsText(Sound):
    def step(self, actions: Mapping[str, Message]) -> Step:
        return Step(metrics={"parsed": "yes"}, done=True, stop_reason="end")  # type: ignore[dict-item]


class ContentIsANumber(Sound):
    def reset(self, task: Task) -> dict[str, list[Message]]:
        return {"agent": [Message("user", 3)]}  # type: ignore[arg-type]


class StepIsATuple(Sound):
    def step(self, actions: Mapping[str, Message]) -> Any:
        return {}, 1.0, True


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


@pytest.fixture
def alarm() -> Iterator[None]:
    """Free the alarm signal, which the time limit of tests uses."""
    handler, timer = signal.signal(signal.SIGALRM, signal.SIG_DFL), signal.setitimer(signal.ITIMER_REAL, 0)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, *timer)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("environment", [Waits(), WaitsAndCatches(), WaitsInLoop()])
def test_a_step_that_does_not_return_ends_the_checks(environment: Sound, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.environment.trial.CALL_SECONDS", 0.2)
    found = [check for check in check_environment(environment).checks if not check.passed]
    assert [check.name for check in found] == ["determinism"]
    assert "did not return within 0.2 s" in found[0].message
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == (signal.SIG_DFL, (0.0, 0.0))


@pytest.mark.usefixtures("alarm")
def test_the_alarm_of_an_environment_is_its_own() -> None:
    assert check_environment(UsesTheAlarm()).passed
    assert signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("handler", [signal.SIG_DFL, print])
def test_the_alarm_of_a_caller_stays(handler: Any) -> None:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 5000.0)
    assert check_environment(Sound()).passed
    assert signal.getsignal(signal.SIGALRM) is handler
    assert 1000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 5000


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
        (
            SharesTasks(),
            "splits are disjoint",
            "; pass other rows to validation (`tasks('validation')`), or where",
        ),
        (
            MathEnvironment(data={split: [{"question": "1+1?", "answer": "2"}] for split in SPLITS}),
            "splits are disjoint",
            "; pass other rows to validation (`--environment.data '{train: FILE, validation: OTHER}'`), or where every",
        ),
        (Draws(), "determinism", "differs on a copy"),
        (DrawsTasks(), "task data", "another task when it is read again"),
        (Shares(), "copies are independent", "copies share state"),
        (Crashes(), "hostile replies", "ValueError"),
        (Exits(), "determinism", "SystemExit: 3"),
        (
            HasABadTool(),
            "tools",
            "the parameters of tool 'add' of agent 'agent' are no JSON schema: at properties/a/type: 'float' is not",
        ),
        (PaysTheSilent(), "best replies", "the best replies earn 1.0"),
        (GoesOn(), "determinism", "did not end within 64 turns"),
        (Unordered(), "order of calls", "step before reset was accepted"),
        (BadSum(), "determinism", "sum to 0.5"),
        (ClosesOnce(), "close", "AttributeError"),
        (ForksBadly(), "copies in mid-episode", "differs on a copy made in mid-episode"),
        (HoldsALock(), "copies in mid-episode", "its attribute 'lock': TypeError: cannot pickle"),
        (HoldsALock(), "copies in mid-episode", "set `forks = False` or write a copy method"),
        (
            OtherName(),
            "task data",
            "its tasks are made for 'osund'; give SeededTasks `self.name` (tests/environment/test_check",
        ),
        (
            ListOfTasks(),
            "task data",
            "tasks returned [{'text': '1'}] (list); return a TaskSource, as in `DatasetTasks(",
        ),
        (
            Text(),
            "splits are disjoint",
            "the observation of agent 'agent' is 'Say it' (str); return new messages by agent",
        ),
        (PlainText(), "splits are disjoint", "the observations are 'Say it' (str); return new messages by agent"),
        (ReturnsANumber(), "determinism", "reply returned 1.0 (float); return an Outcome"),
        (ComponentsAreANumber(), "determinism", "the components of the Outcome are 1.0 (float); give numbers by name"),
        (RewardIsText(), "determinism", "the reward of agent 'agent' is 'much' (str); give a number"),
        (MetricIsText(), "determinism", "the metric 'parsed' is 'yes' (str); give a finite number"),
        (
            ContentIsANumber(),
            "splits are disjoint",
            "the observation of agent 'agent' holds Message(role='user', content=3",
        ),
        (StepIsATuple(), "determinism", "step returned ({}, 1.0, True) (tuple); return a Step"),
    ],
)
def test_each_check_catches_its_fault(environment: Environment, failing: str, message: str) -> None:
    report = check_environment(environment)
    found = {check.name: check.message for check in report.checks if not check.passed}
    assert failing in found
    assert message in found[failing]
    with pytest.raises(EnvironmentContractError, match=environment.name):
        report.raise_on_failure()


def test_every_copy_is_closed() -> None:
    live = list[Environment]()

    class Counted(Sound):
        forks = True

        def copy(self) -> Environment:
            live.append(super().copy())
            return live[-1]

        def close(self) -> None:
            live[:] = [item for item in live if item is not self]

    assert check_environment(Counted()).passed
    assert live == []


@pytest.mark.parametrize("broken", [Text, ReturnsANumber, StepIsATuple, OtherName, Crashes])
def test_a_fault_is_told_with_the_line_of_the_users_code_and_once(broken: type[Environment]) -> None:
    messages = [check.message for check in check_environment(broken()).checks if not check.passed]
    lines, first = inspect.getsourcelines(broken)
    places = [f"tests/environment/test_check.py:{number}" for number in range(first, first + len(lines))]
    assert any(place in messages[0] for place in places), messages[0]
    assert all(len(message.splitlines()) == 1 for message in messages)
    assert len({message for message in messages if not message.startswith("as in ")}) == len(
        [message for message in messages if not message.startswith("as in ")]
    )


def test_an_environment_without_a_name_is_told_how_to_get_one() -> None:
    class GuessTheWord(SingleAgentEnvironment):
        tasks, begin, reply = Sound.tasks, Sound.begin, Sound.reply  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r'GuessTheWord has no name; write `name = "guess_the_word"` in its'):
        check_environment(GuessTheWord())
    assert not hasattr(GuessTheWord, "name"), "introspection sees a missing attribute"


class Game(Sound):
    """Begins with the same words in every task."""

    def tasks(self, split: str) -> Any:
        return DatasetTasks(self.name, split, [{"secret": f"{split} {n}"} for n in range(8)])

    def begin(self, task: Task) -> str:
        self.answer = task.data["secret"]
        return "Your move"

    def gold(self, task: Task) -> None:
        return None


class SecretGame(Game):
    def identity(self, task: Task) -> str:
        return str(task.data["secret"])


class OpenGame(Game):
    def tasks(self, split: str) -> Any:
        return DatasetTasks(self.name, split, [{"secret": "none"}])

    def identity(self, task: Task) -> None:
        return None


class LeakyGame(SecretGame):
    def identity(self, task: Task) -> str:
        return str(task.index)


def test_a_game_declares_what_tells_its_tasks_apart() -> None:
    def splits(environment: Environment) -> Check:
        return next(check for check in check_environment(environment).checks if check.name == "splits are disjoint")

    undeclared = splits(Game())
    assert not undeclared.passed
    assert "define `identity(self, task)`, None if nothing tells tasks apart" in undeclared.message
    assert check_environment(SecretGame()).passed
    assert check_environment(OpenGame()).passed
    assert (splits(OpenGame()).message, splits(OpenGame()).applies) == ("tasks have no identity", False)
    assert not splits(LeakyGame()).passed


def test_async_methods_are_accepted() -> None:
    found = {check.name for check in check_environment(Async()).checks if not check.passed}
    assert found == {"order of calls"}, "a proxy leaves the order to others, and nothing else is wrong with it"


def test_async_methods_are_checked_in_a_notebook() -> None:
    async def cell() -> set[str]:
        return {check.name for check in check_environment(Async()).checks if not check.passed}

    assert asyncio.run(cell()) == {"order of calls"}


def test_data_that_is_not_json_is_found() -> None:
    class Sets(Sound):
        def tasks(self, split: str) -> Any:
            return DatasetTasks(self.name, split, [{"text": split, "answer": "1", "extra": {1, 2}}])

    found = {check.name: check.message for check in check_environment(Sets()).checks if not check.passed}
    assert "not JSON serializable" in found["task data"]
