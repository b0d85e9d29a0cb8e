"""Own rows and reward functions as an environment."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import HarnessEnvironment, QuestionEnvironment, Reward, exact_match
from mrlm_environments.toolbox.functions import FunctionTool

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment, check_semantics
from mrlm_pl.environment.tools import Tool, ToolSet
from mrlm_pl.episode import ToolCall
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError, NonFiniteError, RolloutError
from mrlm_pl.policy import Policy
from tests.support.runs.recorded_episodes import recorded

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]
TWO = ("first", "second")


def exact(reply: str, row: Mapping[str, Any]) -> bool:
    return reply.strip() == row["answer"]


def length(reply: str, row: Mapping[str, Any]) -> int:
    return len(reply)


def played(environment: QuestionEnvironment, *replies: str, split: str = "train") -> Step:
    environment.reset(environment.tasks(split)[0])
    return finished(
        environment.step(
            {agent: Message("assistant", said) for agent, said in zip(environment.agents, replies, strict=True)}
        )
    )


def finished(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def question(rewards: Any, **options: Any) -> QuestionEnvironment:
    return QuestionEnvironment(ROWS, rewards, **{"prompt": "Compute {question}", **options})


def shown(environment: QuestionEnvironment) -> dict[str, list[tuple[str, str]]]:
    posed = environment.reset(environment.tasks("train")[0])
    return {agent: [(message.role, message.content) for message in messages] for agent, messages in posed.items()}


@pytest.mark.parametrize("waits", [False, True])
def test_a_subclass_chooses_what_its_reward_functions_get(waits: bool) -> None:
    class Shouted(QuestionEnvironment):
        def arguments(self, actions: Mapping[str, Message]) -> tuple[Any, dict[str, Any]]:
            reply, row = super().arguments(actions)
            return reply.upper(), {**row, "shouted": True}

    async def waiting(reply: str, row: Mapping[str, Any]) -> float:
        return float((reply, row["shouted"]) == ("AB", True))

    def plain(reply: str, row: Mapping[str, Any]) -> float:
        return float((reply, row["shouted"]) == ("AB", True))

    environment = Shouted(ROWS, [waiting if waits else plain], prompt="{question}")
    assert played(environment, "ab").rewards == {"agent": 1.0}


def test_a_function_that_does_not_apply_returns_no_component() -> None:
    step = played(question([exact, Reward(lambda reply, row: {}, name="other")]), "x")
    assert step.components == {"agent": {"exact": 0.0}}
    with pytest.raises(EnvironmentContractError, match=r"'other' returned None; return a number, .* \({} for none\)"):
        played(question([Reward(lambda reply, row: None, name="other")]), "x")


def test_the_components_are_the_weighted_values_of_the_functions() -> None:
    environment = question([exact, {"call": length, "weight": -0.5, "name": "brevity"}])
    row = environment.tasks("train")[0].data
    step = played(environment, row["answer"])
    cost = -0.5 * len(row["answer"])
    assert step.components == {"agent": {"exact": 1.0, "brevity": cost}}
    assert step.rewards == {"agent": 1.0 + cost}
    assert (step.done, step.stop_reason, step.success) == (True, "answered", None)
    assert played(question([Reward(exact, 2.0)]), row["answer"]).rewards == {"agent": 2.0}
    assert played(question([lambda reply, row: 3]), "x").components == {"agent": {"reward": 3.0}}


def test_a_function_of_weight_0_is_a_metric_and_no_component() -> None:
    def apart(replies: Mapping[str, str], row: Any) -> Any:
        return {"first": {"style": 1.0, "facts": 3.0}, "second": {"style": 0.5}}

    def shared(replies: Mapping[str, str], row: Any) -> float:
        return 2.0

    step = played(question([Reward(apart, 0.0), Reward(shared, 0.0, name="votes"), shared], agents=TWO), "a", "b")
    assert step.components == {"first": {"shared": 2.0}, "second": {"shared": 2.0}}
    assert step.metrics == {"style": 0.75, "facts": 3.0, "votes": 2.0}
    with pytest.raises(EnvironmentContractError, match="the component 'style' twice"):
        played(question([apart, Reward(apart, 0.0, name="again")], agents=TWO), "a", "b")


def test_a_single_reward_is_no_list_of_them() -> None:
    single: Any
    for single in (len, "./my_rewards.py:exact", ["./my_rewards.py:exact"]):
        with pytest.raises(
            ConfigurationError, match=r"rewards is .*; give a list of functions of a reply and its row, not their names"
        ):
            QuestionEnvironment([{"prompt": "?"}], single)


def test_several_agents_share_a_number_or_earn_apart() -> None:
    def shared(replies: Mapping[str, str], row: Any) -> float:
        return len(replies["second"]) / len(replies["first"])

    def apart(replies: Mapping[str, str], row: Any) -> Any:
        return {"first": 1.0, "second": {"style": 0.25, "facts": 0.5}}

    def one(replies: Mapping[str, str], row: Any) -> Any:
        return {"second": -1}

    step = played(question([shared, {"call": apart, "weight": 2}, one], agents=TWO), "ab", "abcd")
    assert step.components == {
        "first": {"shared": 2.0, "apart": 2.0},
        "second": {"shared": 2.0, "style": 0.5, "facts": 1.0, "one": -1.0},
    }
    assert step.rewards == {"first": 4.0, "second": 2.5}


def test_a_mapping_of_named_components_goes_to_all() -> None:
    def grade(replies: Any, row: Any) -> dict[str, float]:
        return {"style": 0.5, "facts": 1}

    parts = {"style": 0.5, "facts": 1.0}
    assert played(question([grade]), "x").components == {"agent": parts}
    assert played(question([grade], agents=TWO), "x", "y").components == {"first": parts, "second": parts}


def test_success_is_a_mean_reward_that_is_reached() -> None:
    by_agent = {"first": 1.0, "second": 0.5}
    for bound, success in ((0.75, True), (0.76, False), (None, None)):
        assert played(question([lambda *_: by_agent], agents=TWO, success_at=bound), "x", "y").success is success


def test_prompts_are_formatted_for_each_agent() -> None:
    environment = question(
        [exact], agents=TWO, prompts={"second": "Check {question} {{x}}"}, system_prompts={"first": "Be brief."}
    )
    asked = environment.tasks("train")[0].data["question"]
    assert shown(environment) == {
        "first": [("system", "Be brief."), ("user", f"Compute {asked}")],
        "second": [("user", f"Check {asked} {{x}}")],
    }
    assert shown(question([exact], system_prompt="S"))["agent"][0] == ("system", "S")


def test_a_prompt_may_be_a_list_of_messages() -> None:
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "{braces} stay"}]
    rows = {"train": [{"prompt": chat}], "validation": [{"prompt": "x"}]}
    environment = QuestionEnvironment(rows, [length])
    assert shown(environment) == {"agent": [("system", "S"), ("user", "{braces} stay")]}
    rows["train"] = [{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}]
    with pytest.raises(DataError, match=r"the given rows, row 1: .* must hold messages whose content is text"):
        QuestionEnvironment(rows, [length]).tasks("train")


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv"])
def test_rows_of_a_file_are_those_of_python(suffix: str, split: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    lines = [json.dumps(row) for row in ROWS]
    table = "question,answer\n" + "".join(f'"{row["question"]}",{row["answer"]}\n' for row in ROWS)
    path.write_text({"json": f"[{','.join(lines)}]", "jsonl": "\n".join(lines), "csv": table}[suffix])
    found = QuestionEnvironment(path if suffix == "json" else str(path), [exact], prompt="{question}").tasks(split)
    expected = QuestionEnvironment(ROWS, [exact], prompt="{question}").tasks(split)
    assert [task.data for task in found] == [task.data for task in expected]


@pytest.mark.parametrize("waits", [False, True], ids=["plain", "async"])
def test_copies_share_the_rows_and_a_function_cannot_change_them(waits: bool) -> None:
    def changed(reply: str, row: dict[str, Any]) -> float:
        row["answers"].append(row.pop("question"))
        return 0.0

    async def waiting(reply: str, row: dict[str, Any]) -> float:
        return changed(reply, row)

    greedy = waiting if waits else changed
    rows = [{**row, "answers": [{"text": row["answer"]}]} for row in ROWS]
    environment = QuestionEnvironment(rows, [greedy, Reward(greedy, name="again")], prompt="{question}")
    source = environment.tasks("train")
    assert environment.copy().tasks("train") is source
    before = json.dumps(source[0].data)
    played(environment, "x")
    assert json.dumps(source[0].data) == before


def test_copies_share_a_judge_with_a_lock() -> None:
    class Judge:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, reply: str, row: Any) -> float:
            with self.lock:
                return 1.0

    environment = question([Judge()]).copy()
    assert played(environment, "x").rewards == {"agent": 1.0}


def test_async_functions_wait_side_by_side_and_plain_ones_leave_the_loop() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    threads = []

    async def met(mine: asyncio.Event, other: asyncio.Event) -> None:
        mine.set()
        await asyncio.wait_for(other.wait(), 60)

    async def one(reply: str, row: Any) -> float:
        await met(first, second)
        return 1.0

    async def two(reply: str, row: Any) -> float:
        await met(second, first)
        return 2.0

    def plain(reply: str, row: Any) -> float:
        threads.append(threading.current_thread())
        return 4.0

    environment = question([one, two, plain])
    assert inspect.iscoroutinefunction(environment.copy().step)
    assert played(environment, "x").components == {"agent": {"one": 1.0, "two": 2.0, "plain": 4.0}}
    assert threads[0] is not threading.main_thread()
    check_environment(question([plain])).raise_on_failure()


def test_coroutines_of_plain_functions_and_in_subclasses_are_awaited() -> None:
    class Mine(QuestionEnvironment):
        name = "mine"

    async def judge(reply: str, row: Any) -> float:
        return 2.0

    def asks(reply: str, row: Any) -> Any:
        return judge(reply, row)

    async def other(reply: str, row: Any) -> float:
        return 1.0

    assert played(question([asks]), "x").rewards == {"agent": 2.0}
    assert played(question([asks, other]), "x").rewards == {"agent": 3.0}
    in_order = played(Mine(ROWS, [judge, length], prompt="{question}"), "x").components
    assert in_order == {"agent": {"judge": 2.0, "length": 1.0}}


def test_async_functions_share_an_event_loop_so_that_a_client_lives_on() -> None:
    loops = set[int]()

    async def judge(reply: str, row: Any) -> float:
        loops.add(id(asyncio.get_running_loop()))
        return 1.0

    environments = [question([judge]), question([lambda reply, row: judge(reply, row)])] * 2
    assert [played(environment, "x").rewards for environment in environments] == [{"agent": 1.0}] * 4
    assert len(loops) == 1


def test_a_plain_function_that_raises_leaves_no_coroutine(recwarn: pytest.WarningsRecorder) -> None:
    class Mine(QuestionEnvironment):
        name = "mine"

    async def judge(reply: str, row: Any) -> float:
        return 1.0

    def asks(reply: str, row: Any) -> Any:
        return judge(reply, row)

    def broken(reply: str, row: Any) -> float:
        raise KeyError("label")

    for environment in (Mine(ROWS, [judge, broken], prompt="{question}"), question([asks, broken])):
        with pytest.raises(KeyError):
            played(environment, "x")
    gc.collect()
    assert not recwarn.list, "as of a coroutine that was never awaited"


def test_a_function_that_raises_cancels_those_beside_it() -> None:
    cancelled, waits = threading.Event(), asyncio.Event()

    async def slow(reply: str, row: Any) -> float:
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0.0

    async def broken(reply: str, row: Any) -> float:
        await waits.wait()
        raise KeyError("label")

    async def play() -> None:
        environment = question([slow, broken])
        environment.reset(environment.tasks("train")[0])
        with pytest.raises(KeyError):
            await environment.step({"agent": Message("assistant", "x")})  # type: ignore[misc]
        assert await asyncio.to_thread(cancelled.wait, 60)

    asyncio.run(play())


@pytest.mark.parametrize("what", ["a reward", "a tool"])
def test_a_function_that_hangs_does_not_keep_the_process_alive(what: str) -> None:
    program = """
import asyncio, sys, threading
from mrlm_environments import QuestionEnvironment
from mrlm_pl.environment import Message

started = threading.Event()

def hangs(reply: str = "", row: str = ""):
    '''Hang.

    Args:
        reply: The reply.
        row: The row.
    '''
    started.set()
    threading.Event().wait()

async def quick(reply, row):
    return 1.0

async def play():
    rewards, tools = ([hangs, quick], []) if sys.argv[1] == "a reward" else ([quick], [hangs])
    environment = QuestionEnvironment([{"prompt": str(n)} for n in range(40)], rewards, tools=tools)
    environment.reset(environment.tasks("train")[0])
    reply = '<tool_call>{"name": "hangs", "arguments": {}}</tool_call>'
    task = asyncio.ensure_future(environment.step({"agent": Message("assistant", reply)}))
    while not started.is_set():
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

asyncio.run(play())
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", program, what], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_the_split_is_of_the_question_and_not_of_the_prompts_words() -> None:
    def questions(split: str, **options: Any) -> list[str]:
        return [task.data["question"] for task in question([exact], **options).tasks(split)]

    others = {"prompt": "{question}", "system_prompt": "Be brief.", "agents": TWO}
    for split in ("train", "validation", "test"):
        assert questions(split) == questions(split, **others)
    turned = [dict(reversed(row.items())) for row in ROWS]
    environment = QuestionEnvironment(turned, [exact], prompt="{question}")
    assert [task.data["question"] for task in environment.tasks("train")] == questions("train")


def test_rows_that_pose_the_same_question_are_in_one_split() -> None:
    rows = [{"question": f"{number % 40}+1?", "answer": str(number)} for number in range(200)]
    environment = QuestionEnvironment(rows, [exact], prompt="Compute {question}", gold="{answer}")
    posed = [{task.data["question"] for task in environment.tasks(split)} for split in ("train", "validation", "test")]
    assert sum(map(len, posed)) == len(set().union(*posed)) == 40
    found = {check.name: check for check in check_semantics(environment, tasks=2, other_process=False).checks}
    assert found["leakage"].passed, found["leakage"].message


def test_rows_are_told_apart_by_all_fields_where_the_prompt_names_none() -> None:
    rows = [{"answer": str(number)} for number in range(40)]
    check_environment(QuestionEnvironment(rows, [exact], prompt="Say a number.")).raise_on_failure()


def test_gold_replies_are_a_text_with_fields_of_the_row() -> None:
    environment = question([exact], gold="{answer}")
    check_semantics(environment, tasks=4, other_process=False).raise_on_failure()
    task = environment.tasks("train")[0]
    assert environment.gold(task) == {"agent": (task.data["answer"],)}
    checked = check_semantics(question([exact], gold="0"), tasks=4, other_process=False)
    wrong = {check.name for check in checked.checks if not check.passed}
    assert wrong == {"floor"}, "gold replies that earn nothing"
    with pytest.raises(DataError, match="'solution'"):
        question([exact], gold="{solution}").tasks("train")


def test_it_keeps_the_contract() -> None:
    async def waiting(replies: Any, row: Any) -> float:
        return float(len(replies))

    check_environment(question([exact, length], success_at=1.0)).raise_on_failure()
    check_environment(question([waiting], agents=TWO)).raise_on_failure()


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
BAD = '<tool_call>{"name": "subtract", "arguments": {}}</tool_call>'


def said(environment: QuestionEnvironment, **replies: str) -> Step:
    return finished(environment.step({agent: Message("assistant", text) for agent, text in replies.items()}))


def calls_made(reply: str, row: Mapping[str, Any], chat: list[dict[str, Any]]) -> dict[str, float]:
    return {"made": float([message["role"] for message in chat].count("tool")), "length": float(len(reply))}


async def calls_made_later(reply: str, row: Mapping[str, Any], chat: list[dict[str, Any]]) -> dict[str, float]:
    return calls_made(reply, row, chat)


@pytest.mark.parametrize("function", [calls_made, calls_made_later])
def test_calls_are_answered_until_a_reply_without_one_which_is_rewarded(function: Any) -> None:
    environment = question([exact, function], tools=[add])
    assert [schema.name for schema in environment.tools("agent")] == ["add"]
    environment.reset(environment.tasks("train")[0])
    step = said(environment, agent=CALL + BAD)
    assert (step.done, step.rewards) == (False, {"agent": 0.0})
    assert [(message.role, message.content) for message in step.observations["agent"]] == [
        ("tool", "3"),
        ("tool", "error: there is no tool 'subtract'; the tools are add"),
    ]
    step = said(environment, agent=environment._row["answer"])
    assert (step.done, step.stop_reason, step.truncated) == (True, "answered", False)
    assert step.components["agent"] == {"exact": 1.0, "made": 2.0, "length": float(len(environment._row["answer"]))}
    assert step.metrics == {"tool_calls": 2.0, "tool_errors": 1.0}


def test_the_last_turn_is_rewarded_even_if_it_calls_a_tool() -> None:
    environment = question([calls_made], tools=[add], max_turns=2)
    environment.reset(environment.tasks("train")[0])
    assert not said(environment, agent=CALL).done
    step = said(environment, agent=CALL)
    assert (step.stop_reason, step.truncated, step.components["agent"]["made"]) == ("max_turns", True, 1.0)
    assert step.metrics["tool_calls"] == 1.0


def test_a_truncated_episode_has_the_counts_of_its_calls() -> None:
    episode = recorded(question([exact], tools=[add]), 2, max_turns=1, gold=lambda task: {"agent": [CALL + BAD]})[1]
    assert (episode.stop_reason, episode.metrics) == ("turn_limit", {"tool_calls": 2.0, "tool_errors": 1.0})


@pytest.mark.parametrize("waits", [False, True])
def test_a_reward_function_cannot_change_the_conversation(waits: bool) -> None:
    def changes(reply: str, row: Mapping[str, Any], chat: list[dict[str, Any]]) -> float:
        chat[0]["tool_calls"][0]["function"]["arguments"]["a"].append(2)
        return 0.0

    async def changes_later(reply: str, row: Mapping[str, Any], chat: list[dict[str, Any]]) -> float:
        return changes(reply, row, chat)

    environment = question([changes_later if waits else changes], tools=[add], max_turns=1)
    environment.reset(environment.tasks("train")[0])
    call = ToolCall("0", "add", {"a": [1]})
    finished(environment.step({"agent": Message("assistant", "", tool_calls=(call,))}))
    assert call.arguments == {"a": [1]}


def test_a_metric_is_not_replaced_by_the_count_of_calls() -> None:
    environment = question([exact, Reward(length, weight=0, name="tool_calls")], tools=[add])
    environment.reset(environment.tasks("train")[0])
    with pytest.raises(EnvironmentContractError, match="the component 'tool_calls' twice; rename one"):
        said(environment, agent="3")


def test_agents_with_tools_end_when_the_last_of_them_has_replied() -> None:
    def all_texts(replies: Mapping[str, str], row: Mapping[str, Any], chat: Mapping[str, list[Any]]) -> dict[str, Any]:
        assert replies == {"first": "mine", "second": "yours"}
        return {agent: len(chat[agent]) for agent in TWO}

    environment = question([all_texts], agents=TWO, tools=[add])
    environment.reset(environment.tasks("train")[0])
    assert list(said(environment, first="mine", second=CALL).observations) == ["second"]
    step = said(environment, second="yours")
    assert step.rewards == {"first": 1.0, "second": 3.0}, "replies and answers of each"


@pytest.mark.parametrize("function", [calls_made, calls_made_later])
def test_tools_live_for_an_episode_and_its_rewards(function: Any) -> None:
    life: list[str] = []

    class Noted(ToolSet):
        def tools(self) -> list[Tool]:
            return [FunctionTool(add)]

        def open(self, task: Task) -> None:
            life.append("open")

        def finish(self) -> None:
            life.append("finish")

        def close(self) -> None:
            life.append("close")

    def exact(reply: str, row: Mapping[str, Any]) -> float:
        life.append("reward")
        return 0.0

    environment = question([exact, function], tools=[Noted()])
    environment.reset(environment.tasks("train")[0])
    said(environment, agent=CALL)
    said(environment, agent="3")
    assert life == ["finish", "open", "reward", "finish"]
    environment.close()
    assert life[4:] == ["close"]


def test_without_tools_a_call_is_a_reply() -> None:
    environment = question([exact])
    environment.reset(environment.tasks("train")[0])
    assert said(environment, agent=CALL).stop_reason == "answered"


def test_an_environment_with_tools_keeps_the_contract() -> None:
    report = check_environment(question([exact], tools=["calculator", add], gold="{answer}"))
    assert report.passed, report
    with pytest.raises(ConfigurationError, match="two are named 'add'"):
        question([exact], tools=[add, add])
    with pytest.raises(ConfigurationError, match="max_turns is 0"):
        question([exact], tools=[add], max_turns=0)


def test_a_function_whose_reply_is_named_chat_is_told_how_it_is_called() -> None:
    with pytest.raises(ConfigurationError, match=r"called with \(reply, row, chat=chat\)"):
        question([lambda chat, row: 0.0])


def test_a_prompt_that_shows_an_accepted_answer_is_found() -> None:
    rows = [{"question": f"{n}+1?", "golden_answers": [str(n + 1)]} for n in range(40)]
    shown = QuestionEnvironment(rows, [exact_match], prompt="{question} {golden_answers[0]}")
    (canary,) = (
        check for check in check_semantics(shown, tasks=1, other_process=False).checks if check.name == "canary"
    )
    assert "shows its field 'golden_answers' to an agent" in canary.message


def test_a_program_has_no_conversation_for_its_reward_functions() -> None:
    with pytest.raises(ConfigurationError, match=r"called with \(reply, row\)"):
        HarnessEnvironment(ROWS, command=["true"], rewards=[calls_made])


@pytest.mark.parametrize(
    "returned", [None, "1", [1.0], {1: 0.5}, {"style": None}, {"first": 1.0, "style": 1.0}, {"first": {"a": "b"}}]
)
def test_what_is_no_number_fails_the_episode_with_the_function(returned: Any) -> None:
    def grade(replies: Any, row: Any) -> Any:
        return returned

    with pytest.raises(
        EnvironmentContractError, match=r"the reward 'grade' returned .*; return a number, numbers by name"
    ):
        played(question([grade], agents=TWO), "x", "y")


def test_two_functions_with_one_component_fail_the_episode() -> None:
    with pytest.raises(EnvironmentContractError, match="return the component 'length' twice; rename one"):
        played(question([length, lambda *_: {"length": 1}]), "x")


def fitted(tmp_path: Path, quiet_trainer: Any, rewards: Any) -> Any:
    data = RolloutDataModule(
        question(rewards), groups=2, group_size=2, iterations=1, retries=0, sampling=Sampling(max_tokens=2)
    )
    trainer = quiet_trainer(default_root_dir=str(tmp_path))
    trainer.fit(GRPO({"main": Policy("builtin:tiny")}), data)
    return list(read_episodes(tmp_path / "episodes"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stops_the_run(value: float, tmp_path: Path, quiet_trainer: Any) -> None:
    def odd(reply: str, row: Any) -> float:
        return value

    with pytest.raises(NonFiniteError, match=f"the reward 'odd' is {value} for the row .*; rewards must be finite"):
        fitted(tmp_path, quiet_trainer, [exact, odd])


def test_a_function_that_raises_fails_its_episode_and_earns_nothing(tmp_path: Path, quiet_trainer: Any) -> None:
    calls = itertools.count(1)

    def unstable(reply: str, row: Any) -> float:
        call = next(calls)
        if call == 1:
            raise ConnectionError("the judge is down")
        return float(call)

    episodes = fitted(tmp_path, quiet_trainer, [unstable])
    failed = [episode for episode in episodes if episode.failed]
    assert len(episodes) == 4
    assert len(failed) == 1
    assert "ConnectionError" in str(failed[0].error)
    assert "test_question.py" in str(failed[0].error)
    assert all(episode.reward >= 2 for episode in episodes if not episode.failed)


def test_a_run_without_any_reward_ends_with_the_fault(tmp_path: Path, quiet_trainer: Any) -> None:
    def broken(reply: str, row: Any) -> float:
        raise KeyError("label")

    async def judge(reply: str, row: Any) -> float:
        raise KeyError("label")

    advice = r"KeyError.*label.*; try `mrlm_pl.check_environment\(environment\)`"
    for number, reward in enumerate((broken, judge)):
        with pytest.raises(RolloutError, match=advice):
            fitted(tmp_path / str(number), quiet_trainer, [reward])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": []}, "rewards is empty"),
        ({"rewards": [exact, exact]}, r"two rewards are named 'exact'; name them, as in \{call: PATH, name: N\}"),
        ({"rewards": [Reward(exact, float("nan"))]}, "the weight nan"),
        ({"rewards": [{"call": exact, "wieght": 2}]}, "Reward has no 'wieght'; did you mean 'weight'"),
        ({"rewards": ["exact"]}, r"is \['exact'\]; give a list of functions"),
        ({"prompts": {"critic": "x"}}, r"prompts names \['critic'\]"),
        ({"agents": []}, "agents is"),
        ({"agents": "solver"}, r"agents is 'solver'; give a list, as in \[solver\]"),
        (
            {"rewards": [Reward(lambda completions, **columns: [1.0], name="trl")]},
            r"'trl' has the arguments \(completions, \*\*columns\), and is called with \(reply, row\): give a function",
        ),
        ({"agents": ["a", "a"]}, "its own name"),
        ({"prompt": "{question"}, "a prompt is malformed: .*write {{ for a brace"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        question(**{"rewards": [exact], **options})


def test_rows_that_cannot_be_used_are_named(caplog: pytest.LogCaptureFixture) -> None:
    bad = [*ROWS, {"answer": "1"}, {"question": "q", "answer": float("nan")}, {"question": "q", "answer": object()}]
    bad += [{"question": None, "answer": "1"}, {"question": [], "answer": "1"}]
    environment = QuestionEnvironment(bad, [exact], prompt="{question}")
    assert [task.data for task in environment.tasks("train")] == [
        task.data for task in question([exact], prompt="{question}").tasks("train")
    ]
    for fault in (
        "row 41: no field 'question'", "row 42: Out of range", "row 43: Object of type object is not JSON",
        "row 44: question is None, and a prompt asks for it", "row 45: question is []",
    ):  # fmt: skip
        assert f"the given rows, {fault}" in caplog.text
    with pytest.raises(DataError, match="the given rows, row 1: no field 'prompt'"):
        QuestionEnvironment(ROWS, [exact]).tasks("train")


OWN = """
def exact(reply, row):
    return reply == row["answer"]

async def length(reply, row):
    return len(reply)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module of reward functions in the working folder, beside ``rows.jsonl``."""
    monkeypatch.chdir(tmp_path)
    Path(f"{tmp_path.name}.py").write_text(OWN)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path.name


def test_functions_of_an_own_file_are_named_on_the_command_line(module: str, mrlm: Any) -> None:
    words = ("question", "--environment.data", "rows.jsonl", "--environment.prompt", "{question}")
    rewards = f"[./{module}.py:exact, {{call: {module}.length, weight: -0.01}}]"
    status, out, err = mrlm("check-env", *words, "--environment.rewards", rewards)
    assert (status, "8 of 8 checks passed" in out) == (0, True), out + err
    for mistake, answer in (
        (f"[{module}.exat]", "did you mean 'exact'"),
        (f"[./{module}_.py:exact]", f"did you mean '{module}.py'"),
        (f"[{{call: {module}.exact, wieght: 1}}]", "did you mean 'weight'"),
        ("[exact]", "rewards"),
    ):
        status, _, err = mrlm("check-env", *words, "--environment.rewards", mistake)
        assert (status, answer in err, len(err.splitlines())) == (2, True, 1), err


def test_a_configuration_names_a_file_for_each_split(module: str, mrlm: Any) -> None:
    Path("held.jsonl").write_text(json.dumps({"question": "held out", "answer": "1"}) + "\n")
    data = "{train: rows.jsonl, validation: held.jsonl}"
    words = (
        "--environment.data",
        data,
        "--environment.prompt",
        "{question}",
        "--environment.rewards",
        f"[{module}.exact]",
    )
    played = ("collect", "--model", "builtin:tiny", "--environment", "question", *words, "--split", "validation")
    status, _, err = mrlm(*played, "-n", "1", "--output", "held-out.jsonl")
    assert status == 0, err
    assert "held out" in Path("held-out.jsonl").read_text()


@pytest.mark.long
def test_a_run_is_evaluated_and_replayed_with_its_functions(module: str, mrlm: Any) -> None:
    rewards = [f"{module}.exact", {"call": f"{module}.length", "weight": 0.1}]
    arguments = {"data": "rows.jsonl", "prompt": "{question}", "rewards": rewards, "success_at": 1.0}
    environment = {"class_path": "QuestionEnvironment", "init_args": arguments}
    data = {"environment": environment, "groups": 2, "group_size": 2, "iterations": 1, "sampling": {"max_tokens": 2}}
    held_out = {"class_path": "HeldOutEvaluation", "init_args": {"episodes": 2}}
    config = {
        "model": "GRPO",
        "data": {"class_path": "RolloutDataModule", "init_args": data},
        "trainer": {"accelerator": "cpu", "limit_val_batches": 0, "callbacks": [held_out]},
    }
    Path("own.yaml").write_text(json.dumps(config))
    status, _, err = mrlm("fit", "--config", "own.yaml", "--output", "run")
    assert status == 0, err
    status, out, err = mrlm("replay", "run")
    assert (status, "4 of 4 episodes are equal" in out) == (0, True), out + err
    assert f'rewards ["{module}.exact", {{"call": "{module}.length"' in err
    status, out, err = mrlm("eval", "--model", "run", "-n", "2", "--output", "report.json")
    assert (status, f'rewards ["{module}.exact"' in out) == (0, True), out + err
    recorded = json.loads(Path("report.json").read_text())["settings"]["rewards"]
    assert recorded == [f"{module}.exact", {"call": f"{module}.length", "weight": 0.1, "name": ""}]
    for report in ("report.json", "run/evaluation_before.json"):
        status, _, err = mrlm("eval", "--model", "run", "-n", "2", "--compare", report)
        assert (status, "other environment settings" in err) == (0, False), err
    others = ("--environment.rewards", json.dumps([f"{module}.length"]))
    _, _, err = mrlm("eval", "--model", "run", *others, "-n", "2", "--compare", report)
    assert "other environment settings: rewards is" in err
    status, _, err = mrlm("collect", "--model", "run", "-n", "2", "--output", "kept.jsonl")
    assert status == 0, err
    Path("run/theirs.py").write_text(OWN)
    saved = Path("run/config.yaml")
    written = saved.read_text()
    assert f"{Path.cwd()}/{module}.py:exact" in written
    saved.write_text(written.replace(f"{Path.cwd()}/{module}.py:exact", "./run/theirs.py:exact"))
    status, _, err = mrlm("eval", "--model", "run", "-n", "2")
    assert (status, "'./run/theirs.py:exact' is a program in the run folder" in err) == (2, True), err
