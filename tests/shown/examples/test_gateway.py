"""Agents of other frameworks, unchanged; the curve of a run through the endpoint is that of the same run without it."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import HarnessEnvironment

import mrlm_pl
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task
from tests.support.documents import ROOT
from tests.support.servers.harness_programs import played

ROWS = [{"question": f"{a} + {b}?", "answer": str(a + b)} for a in range(1, 7) for b in range(1, 7)]


def exact(output: str, row: Mapping[str, Any]) -> float:
    return float(output.strip() == row["answer"])


class SolverAndChecker(Environment):
    """The program of examples/gateway/two_agents.py, written as an environment."""

    name = "harness"
    agents = ("solver", "checker")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, ROWS)

    def reset(self, task: Task) -> Observations:
        self.row = task.data
        return {"solver": [Message("user", self.row["question"])]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        ((agent, said),) = actions.items()
        if agent == "solver":
            return Step({"checker": [Message("user", f"{self.row['question']} Draft: {said.content}")]})
        right = exact(said.content, self.row)
        parts = {name: {"exact": right} for name in self.agents}
        return Step(rewards=dict.fromkeys(self.agents, right), components=parts, done=True, stop_reason="ended")


def curve(environment: Environment, folder: Path, iterations: int) -> list[dict[str, str]]:
    """Return the metrics of a run that do not measure time."""
    import lightning

    lightning.seed_everything(0)
    policies = {agent: mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3) for agent in environment.agents}
    data = mrlm_pl.RolloutDataModule(
        environment, groups=4, group_size=4, iterations=iterations, sampling=mrlm_pl.Sampling(max_tokens=8)
    )
    trainer = mrlm_pl.Trainer(default_root_dir=folder, limit_val_batches=0, max_epochs=1)
    trainer.fit(mrlm_pl.GRPO(policies), data)
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    # The counters of calls are metrics of the program alone.
    unequal = ("second", "time", "harness/", "memory", "progress/", "kernel")
    return [{key: value for key, value in row.items() if not any(word in key for word in unequal)} for row in rows]


def endpoint_environment(name: str) -> HarnessEnvironment:
    data = dict.fromkeys(("train", "validation", "test"), ROWS)
    rewards: Any = [exact]
    if name == "function":
        sys.path.insert(0, str(ROOT / "examples" / "gateway"))
        try:
            from two_agents import play
        finally:
            sys.path.pop(0)
        return HarnessEnvironment(data, function=play, rewards=rewards, agents=["solver", "checker"])
    command = [sys.executable, str(ROOT / "examples" / "gateway" / "two_agents.py"), "{question}"]
    return HarnessEnvironment(data, command, rewards=rewards, agents=["solver", "checker"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "iterations"), [("function", 8), ("command", 2)])
def test_the_curve_is_that_of_the_same_environment_written_here(
    kind: str, iterations: int, outside_the_repository: None, tmp_path: Path
) -> None:
    there = curve(endpoint_environment(kind), tmp_path / "there", iterations)
    here = curve(SolverAndChecker(), tmp_path / "here", iterations)
    assert len([row for row in here if row["rollout/reward"]]) == iterations
    assert there == here


OPENAI_AGENTS = """
import asyncio, os, sys
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

async def main():
    client = AsyncOpenAI()
    planner = Agent(name="planner", instructions="Plan.", model=OpenAIChatCompletionsModel("planner", client))
    solver = Agent(name="solver", instructions="Solve.", tools=[add], model=OpenAIResponsesModel("solver", client))
    plan = await Runner.run(planner, sys.argv[1])
    print((await Runner.run(solver, plan.final_output)).final_output)

asyncio.run(main())
"""

LANGGRAPH = """
import sys
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

@tool
def add(a: int, b: int) -> int:
    "Add two numbers."
    return a + b

planner, solver = ChatOpenAI(model="planner"), ChatOpenAI(model="solver").bind_tools([add])
plan = planner.invoke([("system", "Plan."), ("user", sys.argv[1])])
graph = StateGraph(MessagesState)
graph.add_node("solver", lambda state: {"messages": [solver.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "solver")
graph.add_conditional_edges("solver", tools_condition)
graph.add_edge("tools", "solver")
found = graph.compile().invoke({"messages": [("system", "Solve."), ("user", plan.content)]})
print(found["messages"][-1].content)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("agents", OPENAI_AGENTS), ("langgraph", LANGGRAPH)])
def test_an_unchanged_program_of_another_framework(package: str, code: str, tmp_path: Path) -> None:
    python = ROOT / ".venv-agents" / "bin" / "python"
    if not python.exists():
        pytest.skip("`make agents` installs the other frameworks")
    script = tmp_path / "program.py"
    script.write_text(code)
    environment = HarnessEnvironment(
        {"train": [{"question": "1 + 2?"}]},
        [str(python), str(script), "{question}"],
        rewards=[lambda output, row: float(output.strip() == "It is 3.")],
        agents=["planner", "solver"],
    )
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    (episode,) = played(environment, [{"planner": ["Add them."], "solver": [call, "It is 3."]}])
    assert (episode.error, episode.rewards()) == (None, {"planner": 1.0, "solver": 1.0})
    (solver,) = episode.trajectories["solver"]
    assert [message.role for message in solver.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [message.content for message in solver.messages[1:]] == ["Add them.", call, "3", "It is 3."]
    assert len(solver.turns) == 2, "the result of the tool continues the trajectory"
    assert episode.row_restarts == 0
