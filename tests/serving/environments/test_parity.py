"""The same actions give the same bytes here and on a server, for every environment that comes with the package."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mrlm_pl.environment import Environment
from mrlm_pl.environment.check import HOSTILE_REPLIES
from mrlm_pl.environment.steps import TurnOrder
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.serving import RemoteEnvironment
from tests.support.servers.environment_servers import Served, eventually, offer

MAX_TURNS = 12
CHEAP = [
    "alfworld",
    "collaborative_reasoning",
    "coordination",
    "debate",
    "knowledge_graph",
    "length_ratio",
    "math",
    "sql",
    "tools",
    "webshop",
    "writing",
]
SANDBOXED = {"class_completion": 2, "code": 6, "collaborative_coding": 2, "shell": 4}
"""Environments that run programs, and how many seeds are quick."""


def make(name: str) -> Environment:
    from mrlm_environments.alfworld.environment import AlfWorldEnvironment
    from mrlm_environments.class_completion.environment import ClassCompletionEnvironment
    from mrlm_environments.code.environment import CodeEnvironment
    from mrlm_environments.collaborative_coding.environment import CollaborativeCodingEnvironment
    from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment
    from mrlm_environments.debate.environment import DebateEnvironment
    from mrlm_environments.games.coordination import CoordinationGame
    from mrlm_environments.games.length_ratio import LengthRatioGame
    from mrlm_environments.knowledge_graph.environment import KnowledgeGraphEnvironment
    from mrlm_environments.math.environment import MathEnvironment
    from mrlm_environments.shell.environment import ShellEnvironment
    from mrlm_environments.sql.environment import SqlEnvironment
    from mrlm_environments.tools.environment import ToolEnvironment
    from mrlm_environments.webshop.environment import WebShopEnvironment
    from mrlm_environments.writing.environment import WritingEnvironment

    makers: dict[str, Callable[[], Environment]] = {
        "alfworld": AlfWorldEnvironment,
        "class_completion": ClassCompletionEnvironment,
        "collaborative_coding": lambda: CollaborativeCodingEnvironment(turns=2, feedback="level_feedback"),
        "code": lambda: CodeEnvironment(max_attempts=2),
        "collaborative_reasoning": lambda: CollaborativeReasoningEnvironment(
            3, role="leader", consensus_stop=True, show_scores=True, policies_by="turn"
        ),
        "coordination": CoordinationGame,
        "knowledge_graph": KnowledgeGraphEnvironment,
        "length_ratio": LengthRatioGame,
        "debate": lambda: DebateEnvironment(reward="score"),
        "math": lambda: MathEnvironment(max_attempts=3, steps_bonus=0.2),
        "shell": ShellEnvironment,
        "sql": SqlEnvironment,
        "tools": ToolEnvironment,
        "webshop": WebShopEnvironment,
        "writing": lambda: WritingEnvironment("arxiv", turns=2),
    }
    return makers[name]()


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    from mrlm_pl.concurrency.event_loop import EventLoopThread
    from mrlm_pl.serving.environments.service import Limits
    from mrlm_pl.serving.server import EnvironmentServer

    names = [*CHEAP, *SANDBOXED]
    hosted = offer(more={name: lambda settings, name=name: make(name) for name in names})
    loop = EventLoopThread()
    server = EnvironmentServer(hosted, limits=Limits(step_seconds=60))
    loop.submit(server.start()).result(20)
    served = Served(server, loop)
    yield served.target
    eventually(lambda: served.live == 0)
    served.stop()


Replies = Mapping[str, Sequence[str]]


def record(environment: Environment, task: Task, replies: Replies) -> str:
    """All that an episode showed, with types and orders: ``repr`` tells ``True``, ``1`` and ``1.0`` apart."""

    async def play() -> list[Any]:
        async def called(method: Callable[..., Any], argument: Any) -> Any:
            value = method(argument)
            return await value if asyncio.iscoroutine(value) else value

        order = TurnOrder(environment.name, environment.agents)
        observations = await called(environment.reset, task)
        shown: list[Any] = [_plain(observations), [list(environment.tools(agent)) for agent in environment.agents]]
        order.record_reset(observations)
        for turn in range(MAX_TURNS):
            said = {agent: replies[agent][min(turn, len(replies[agent]) - 1)] for agent in order.due}
            actions = {agent: Message("assistant", text) for agent, text in said.items()}
            order.check_actions(actions)
            step = await called(environment.step, actions)
            order.record_step(step)
            fields = dict(vars(step))
            shown.append({**fields, "observations": _plain(step.observations)})
            if step.done:
                break
        return shown

    try:
        return repr(asyncio.run(play()))
    finally:
        environment.close()


def _plain(observations: Mapping[str, Sequence[Message]]) -> dict[str, list[Message]]:
    return {agent: list(messages) for agent, messages in observations.items()}


def wire(text: str) -> str:
    """Halves of characters cannot be sent, and no tokenizer makes them."""
    return text.encode("utf-8", "replace").decode()


OTHERS = ["I do not know: 17.", *(wire(reply) for reply in HOSTILE_REPLIES)]


def plays(environment: Environment, task: Task, index: int) -> Iterator[Replies]:
    """The best replies, and a wrong or hostile one; each task meets another of them."""
    gold = environment.gold(task)
    if gold is not None:
        yield gold
    reply = OTHERS[index % len(OTHERS)]
    yield {agent: [reply, "still 17", reply] for agent in environment.agents}


def compare(name: str, target: str, seeds: range) -> None:
    try:
        local = make(name)
        source = local.tasks("train")
    except ConfigurationError as error:
        pytest.skip(f"{name}: {error}")
    remote = RemoteEnvironment(target, name)
    assert remote.agents == local.agents
    remote_source = remote.tasks("train")
    assert remote_source.size == source.size
    rewards = set()
    for index in seeds:
        task = source[index]
        assert repr(remote_source[index]) == repr(task)
        for replies in plays(local, task, index):
            here = record(local.copy(), task, replies)
            assert record(remote.copy(), task, replies) == here
            rewards |= set(re.findall("'rewards': {.*?}", here))
    assert len(rewards) > 1, "good and bad replies were among them"


@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.long_after(4)
def test_every_reply_is_answered_alike_here_and_there(name: str, target: str) -> None:
    compare(name, target, range(len(OTHERS)))


@pytest.mark.parametrize("name", SANDBOXED)
@pytest.mark.long_after(2)
def test_some_seeds_of_environments_that_run_programs(name: str, target: str) -> None:
    compare(name, target, range(SANDBOXED[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", SANDBOXED)
def test_fifty_seeds_of_environments_that_run_programs(name: str, target: str) -> None:
    compare(name, target, range(50))
