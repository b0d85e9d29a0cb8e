from __future__ import annotations

import asyncio
import copy
import inspect
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar, get_type_hints

import numpy as np
import pytest
import torch

from mrlm_pl.environment import (
    DatasetTasks,
    Environment,
    Observations,
    Outcome,
    SeededTasks,
    SingleAgentEnvironment,
    Step,
)
from mrlm_pl.environment.steps import TurnOrder
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, NonFiniteError

SAID = Message("assistant", "x")
ASKED = [Message("user", "?")]


def order(*due: str) -> TurnOrder:
    made = TurnOrder("game", ("a", "b"))
    made.record_reset(dict.fromkeys(due, ASKED))
    return made


def test_who_gets_an_observation_acts_next() -> None:
    turns = order("b")
    assert turns.due == ("b",)
    turns.check_actions({"b": SAID})
    turns.record_step(Step({"a": ASKED, "b": ASKED}))
    assert turns.due == ("a", "b")


def test_one_name_without_a_comma_is_no_tuple_of_agents() -> None:
    with pytest.raises(EnvironmentContractError, match=r"Alone.agents is 'solo'; give a tuple, as in `\('solo',\)`"):
        type("Alone", (Environment,), {"name": "alone", "agents": ("solo")})


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(rewards=1.0, done=True, stop_reason="end"), "rewards are .*1.0.*; give them by agent, as in {'a': 1.0}"),  # type: ignore[arg-type]
        (Step(rewards={"c": 1.0}, done=True, stop_reason="end"), "agent 'c'"),
        (
            Step(rewards={"b": 1.0}, done=True, stop_reason="end"),
            "before its first decision; reward only agents that acted",
        ),
        (Step(rewards={"a": 1.0}, components={"a": {"x": 0.4}}, done=True, stop_reason="end"), "sum to 0.4"),
        (Step(components={"a": {"x": "much"}}, done=True, stop_reason="end"), "give numbers by name"),
        (Step({"a": ASKED}, done=True, stop_reason="end"), "done but"),
        (Step(), "no agent received an observation"),
        (Step(done=True), "without a stop_reason"),
        (Step({"c": ASKED}), "observation is for agent 'c'"),
        (Step({"b": []}), "agent 'b' has no message before its first decision"),
        (Step(done=True, stop_reason="end", success="no"), "success is 'no' .str.; give True, False or None"),  # type: ignore[arg-type]
        (Step(done=True, stop_reason="end", success=0.3), "success is 0.3 .float."),  # type: ignore[arg-type]
        (Step(done=True, stop_reason="end", truncated="no"), "truncated is 'no' .str.; give True or False"),  # type: ignore[arg-type]
        (Step(done=True, stop_reason=3), "the stop_reason is 3 .int.; name why it ended in a word"),  # type: ignore[arg-type]
    ],
)
def test_a_step_that_breaks_the_contract_is_named(step: Step, message: str) -> None:
    turns = order("a")
    turns.check_actions({"a": SAID})
    with pytest.raises(EnvironmentContractError, match=message):
        turns.record_step(step)


@pytest.mark.parametrize("data", [["question"], None, "question"])
def test_data_of_a_task_that_no_record_could_hold_are_refused(data: Any, echo: Any) -> None:
    with pytest.raises(EnvironmentContractError, match=r"the data of task e/train/1 is .*; give a mapping, as in"):
        echo().reset(Task("e", "train", 1, data=data))


@pytest.mark.parametrize("agents", [(), ("a", "b", "a")])
def test_agents_without_a_name_of_their_own_are_named(agents: tuple[str, ...], echo: Any) -> None:
    environment = echo()
    environment.agents = agents
    with pytest.raises(ConfigurationError, match=re.escape(f"its agents are {list(agents)}; give each its own name")):
        environment.tasks("train")


def test_rewards_that_are_left_out_are_the_sums_of_the_components() -> None:
    parts = {"a": {"x": 0.1, "y": 0.2, "z": -1.0}, "b": {"x": 0.5}}
    assert Step({"a": ASKED}, components=parts).rewards == pytest.approx({"a": -0.7, "b": 0.5})


@pytest.mark.parametrize("given", [True, 1, 1.0, np.True_, np.float32(1.0), torch.tensor(True)])
def test_truth_values_are_kept_as_those_of_python(given: Any) -> None:
    step = Step(done=given, stop_reason="end", success=given, truncated=given)
    assert (step.done, step.success, step.truncated) == (True, True, True)
    assert {*map(type, (step.done, step.success, step.truncated))} == {bool}


class Counting(Environment):
    """Two steps; written without a thought to the order of calls."""

    name = "counting"

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        self.count = 0
        return {"agent": ASKED}

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.count += 1
        return Step({} if self.count == 2 else {"agent": ASKED}, done=self.count == 2, stop_reason="two")


class AsyncCounting(Counting):
    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(actions)


class Unexplained(AsyncCounting):
    """Ends without a reason; only its subclass can be played."""

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        return replace(await super().step(actions), stop_reason="")


class Explained(Unexplained):
    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        return replace(await super().step(actions), stop_reason="two")


@pytest.mark.parametrize("cls", [Counting, AsyncCounting, Explained])
def test_the_base_class_keeps_the_order_of_calls(cls: type[Counting]) -> None:
    def finished(value: Any) -> Any:
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    async def _awaited(value: Any) -> Any:
        return await value

    environment = cls()
    (task,) = environment.tasks("train")
    assert inspect.iscoroutinefunction(environment.step) == (cls is not Counting)
    with pytest.raises(EnvironmentContractError, match="before reset"):
        finished(environment.step({"agent": SAID}))
    finished(environment.reset(task=task))
    with pytest.raises(EnvironmentContractError, match=r"due are \['agent'\]"):
        finished(environment.step({"somebody": SAID}))
    finished(environment.step({"agent": SAID}))
    forked = environment.copy()
    assert finished(environment.step(actions={"agent": SAID})).done
    with pytest.raises(EnvironmentContractError, match="after the episode was done"):
        finished(environment.step({"agent": SAID}))
    assert finished(forked.step({"agent": SAID})).done, "the copy continues from its fork"
    finished(environment.reset(task))
    assert not finished(environment.step({"agent": SAID})).done


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_rewards_must_be_numbers(reward: float) -> None:
    turns = order("a")
    turns.check_actions({"a": SAID})
    with pytest.raises(NonFiniteError, match=r"'game'.*'a'"):
        turns.record_step(Step(rewards={"a": reward}, done=True, stop_reason="end"))


def test_actions_out_of_order_are_refused() -> None:
    with pytest.raises(EnvironmentContractError, match="before reset"):
        TurnOrder("game", ("a",)).check_actions({"a": SAID})
    with pytest.raises(EnvironmentContractError, match=r"due are \['a'\]"):
        order("a").check_actions({"b": SAID})


def test_a_single_agent_environment_sees_plain_values(echo: Any) -> None:
    environment = echo(turns=2)
    observations = environment.reset(environment.tasks("train")[3])
    assert [message.content for message in observations["agent"]] == ["Say t3"]
    first = environment.step({"agent": Message("assistant", "1a")})
    assert (first.rewards, first.components, first.done) == ({"agent": 0.5}, {"agent": {"digits": 0.5}}, False)
    second = environment.step({"agent": Message("assistant", "11")})
    assert (second.done, second.stop_reason, second.success) == (True, "answered", True)
    with pytest.raises(EnvironmentContractError, match="after the episode was done"):
        environment.step({"agent": SAID})


def test_components_of_an_outcome_make_its_reward(echo: Any) -> None:
    class Parts(echo):  # type: ignore[misc, valid-type]
        def reply(self, message: Message) -> Outcome:
            return Outcome({"x": 0.1, "y": 0.2, "z": -1.0})

    environment = Parts()
    environment.reset(environment.tasks("train")[0])
    assert environment.step({"agent": SAID}).rewards["agent"] == pytest.approx(-0.7)


def test_generated_tasks_are_a_function_of_the_index_and_disjoint() -> None:
    def source(split: str) -> SeededTasks:
        return SeededTasks("g", split, lambda rng: {"n": rng.randint(0, 99)}, lambda data: str(data["n"]))

    assert [source("train")[n] for n in (4, 2)] == [source("train")[4], source("train")[2]]
    numbers = {split: {source(split)[n].data["n"] for n in range(200)} for split in ("train", "validation", "test")}
    assert all(split_of(str(number)) == split for split, found in numbers.items() for number in found)
    with pytest.raises(ConfigurationError, match="no split 'dev'"):
        source("dev")


def test_a_generator_that_cannot_fill_a_split_says_so() -> None:
    only = next(str(n) for n in range(100) if split_of(str(n)) == "train")
    source = SeededTasks("g", "test", lambda rng: {"n": only}, lambda data: data["n"])
    source.MAX_ATTEMPTS = 50
    with pytest.raises(ConfigurationError, match="widen the generator's range"):
        source[0]


def test_copies_of_an_environment_share_the_rows_of_its_tasks() -> None:
    source = DatasetTasks("g", "train", [{"n": 1}])
    assert copy.deepcopy(source) is source
    with pytest.raises(IndexError):
        source[1]
    with pytest.raises(ConfigurationError, match="no task in split"):
        DatasetTasks("g", "train", [])


class Sized(SingleAgentEnvironment):
    """Written by a user; only its arguments matter."""

    name = "sized"

    def __init__(self, rounds: int = 2, mood: Literal["kind", "stern"] = "kind") -> None:
        self.rounds, self.mood = rounds, mood

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{}])

    def begin(self, task: Task) -> str:
        return "?"

    def reply(self, message: Message) -> Outcome:
        return Outcome(0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"round": 3}, TypeError, "Sized has no 'round'; did you mean 'rounds'?"),
        ({"rounds": 1.5}, ConfigurationError, "Sized: rounds is 1.5; it must be a whole number"),
        ({"mood": "sad"}, ConfigurationError, "Sized: mood is 'sad'; choose from kind, stern"),
    ],
)
def test_arguments_of_an_own_environment_are_checked(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        Sized(**arguments)
    assert Sized(np.int64(3)).rounds == 3


def test_type_checkers_know_a_single_agent_environment_and_its_random_numbers() -> None:
    """Pyright takes the class of a new instance from ``__new__``."""
    assert isinstance(get_type_hints(SingleAgentEnvironment.__new__)["return"], TypeVar)
    assert get_type_hints(SeededTasks.__init__)["generate"] == Callable[[random.Random], Mapping[str, Any]]
