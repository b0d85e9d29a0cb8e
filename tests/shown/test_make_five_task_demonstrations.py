from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from mrlm_pl.episode import Message
from mrlm_pl.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
NAMES = ("shell", "sql", "knowledge_graph", "webshop", "alfworld")


@pytest.fixture
def script(example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples/tiny_model"))
    return example("tiny_model/make_five_task_demonstrations.py")


@pytest.mark.parametrize("name", NAMES)
def test_careful_rows_solve_their_tasks_and_hurried_ones_rarely(script: ModuleType, name: str) -> None:
    if name == "shell":
        try:
            _ = Sandbox(level="namespaces").isolation
        except Exception as error:
            pytest.skip(f"this machine does not offer namespaces: {error}")
    environment = script.ENVIRONMENTS[name]()
    solved: dict[bool, list[bool]] = {True: [], False: []}
    tasks = [environment.tasks("train")[index] for index in range(20)]
    for task in [task for task in tasks if script.careful_replies(environment, task)][:6]:
        for careful, wins in solved.items():
            row = script.demonstration(environment, task, careful)
            environment.reset(task)
            said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
            steps = [environment.step({"agent": Message("assistant", text)}) for text in said]
            ends = careful or name != "alfworld"  # a house has no wrong answer
            assert [step.done for step in steps] == [False] * (len(said) - 1) + [ends]
            wins.append(sum(step.rewards.get("agent", 0.0) for step in steps) > 0.9)
    environment.close()
    assert len(solved[True]) == 6
    assert all(solved[True])
    assert sum(solved[False]) <= 2


def test_the_environments_are_those_of_the_configuration(script: ModuleType) -> None:
    data = yaml.safe_load((ROOT / "configs/tasks/five_tasks.yaml").read_text())["data"]["init_args"]
    classes = [item["class_path"] for item in data["environment"]]
    assert [type(script.ENVIRONMENTS[name]()).__name__ for name in NAMES] == classes
    for name, item in zip(NAMES, data["environment"], strict=True):
        environment = script.ENVIRONMENTS[name]()
        for argument, value in item.get("init_args", {}).items():
            held = getattr(environment, argument)
            assert (list(held) if isinstance(held, tuple) else held) == value, (name, argument)
    longest = data["sampling"]["max_tokens"]
    for name in NAMES[1:]:
        for row in script.demonstrations(name, 30):
            said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
            assert max(map(len, said)) < longest, "a token is a letter, and one ends the turn"
