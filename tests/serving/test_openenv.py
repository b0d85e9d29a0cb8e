"""Our OpenEnv server with our client, and both with the package `openenv` (`make openenv`)."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import subprocess
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import reasoning_gym
from aiohttp import WSMsgType, web
from aiohttp.log import server_logger
from mrlm_environments import CoordinationGame, MathEnvironment, OpenEnvEnvironment

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.environment import Environment, Message, Step
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.openenv import OpenEnvServer
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport.security import Identity
from tests.support.servers.environment_servers import Scripted, ServerProcess, eventually
from tests.support.servers.foreign_servers import OPENENV, echo_server, openenv_server
from tests.support.servers.ports import nowhere

OFFERED: dict[str, Callable[[Any], Environment]] = {
    "math": lambda settings: MathEnvironment((1, 1), max_attempts=2, system_prompt="Be brief."),
    "coordination": lambda settings: CoordinationGame(),
    "scripted": lambda settings: Scripted(),
}


class Exported:
    """A server of environments for OpenEnv's clients, on its own event loop."""

    def __init__(self, names: Sequence[str], token: str | None = None) -> None:
        self.loop = EventLoopThread()
        offer = Offer({name: OFFERED[name] for name in names}, processes=0, step_seconds=60.0)
        self.server = EnvironmentServer(offer, Endpoint(token=token))
        self.openenv = OpenEnvServer(self.server, 0)
        for starting in (self.server.start(), self.openenv.start()):
            self.loop.submit(starting).result(60)
        self.url = f"http://127.0.0.1:{self.openenv.port}"

    def stop(self) -> None:
        for stopping in (self.openenv.stop(), self.server.stop()):
            self.loop.submit(stopping).result(60)
        self.loop.close()


@pytest.fixture
def export() -> Iterator[Callable[..., Exported]]:
    servers: list[Exported] = []

    def start(*names: str, **options: Any) -> Exported:
        servers.append(Exported(names, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def conversation(environment: Environment, task: Any, *texts: str) -> tuple[list[Message], list[Step]]:
    """Return the first messages and the steps of an episode."""

    async def play() -> tuple[list[Message], list[Step]]:
        first = await environment.reset(task)
        return list(first["agent"]), [await environment.step({"agent": Message("assistant", text)}) for text in texts]

    try:
        return asyncio.run(play())
    finally:
        environment.close()


def talk(url: str, *messages: Any, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the answers to raw messages of one connection."""

    async def send() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(headers=headers) as session, session.ws_connect(f"{url}/ws") as socket:
            answers = []
            for message in messages:
                await socket.send_str(message if isinstance(message, str) else json.dumps(message))
                answers.append(await socket.receive_json(timeout=60))
            return answers

    return asyncio.run(send())


def test_an_episode_is_that_of_the_environment(export: Callable[..., Exported]) -> None:
    url = export("math").url
    environment, native = OpenEnvEnvironment(url), OFFERED["math"]({})
    task = environment.tasks("train")[4]
    posed = native.tasks("train")[task.data["seed"]]
    first, steps = conversation(environment, task, "no number", posed.data["answer"])
    assert first == list(native.reset(posed)["agent"])
    assert [message.role for message in first] == ["system", "user"]
    assert [step.rewards["agent"] for step in steps] == [-0.3, 1.0]
    assert steps[0].observations == {"agent": [Message("user", "That is not correct. Try again.")]}
    assert (steps[1].done, steps[1].success, steps[1].truncated) == (True, True, False)
    environment.copy()  # for another episode


@pytest.mark.long
def test_exported_environments_keep_the_contract_through_the_client(export: Callable[..., Exported]) -> None:
    url = export("math", "scripted").url
    rows = [{"index": n, "split": "test"} for n in range(40)]
    for environment in (
        OpenEnvEnvironment(f"{url}/math"),
        OpenEnvEnvironment(f"{url}/math", data=rows, observation="{text}", max_turns=1),
        OpenEnvEnvironment(f"{url}/scripted", action="json", max_turns=3),
    ):
        check_environment(environment, tasks_per_split=3).raise_on_failure()


def test_a_reply_that_is_no_action_earns_nothing_and_says_why(export: Callable[..., Exported]) -> None:
    environment = OpenEnvEnvironment(f"{export('math').url}", action="json", max_turns=4)
    texts = ("Well, 7", '{"massage": "7"}', '<think>7?</think>\n```json\n{"message": "none"}\n```', "[1]")
    first, steps = conversation(environment, environment.tasks("train")[0], *texts)
    assert '"required": ["message"]' in first[-1].content
    assert [step.rewards["agent"] for step in steps] == [0.0, 0.0, -0.3, 0.0]
    assert [step.metrics["invalid"] for step in steps] == [1.0, 1.0, 0.0, 1.0]
    assert "not a JSON object" in steps[0].observations["agent"][0].content
    assert 'give {"message": TEXT}' in steps[1].observations["agent"][0].content
    assert (steps[3].done, steps[3].truncated, steps[3].stop_reason) == (True, True, "max_turns")


def test_several_agents_act_by_name(export: Callable[..., Exported]) -> None:
    url = export("coordination", "math").url + "/coordination"
    game = CoordinationGame()
    task = game.tasks("train")[5]
    best = {agent: texts[0] for agent, texts in (game.gold(task) or {}).items()}
    opened, refused, played, state = talk(
        url,
        {"type": "reset", "data": {"index": 5, "episode_id": "mine"}},
        {"type": "step", "data": {"message": "C"}},
        {"type": "step", "data": {"messages": best}},
        {"type": "state"},
    )
    shown = {agent: [message.to_chat() for message in given] for agent, given in game.reset(task).items()}
    assert opened["data"]["observation"]["messages"] == shown
    assert refused["data"]["code"] == "VALIDATION_ERROR"
    step = game.step({agent: Message("assistant", text) for agent, text in best.items()})
    assert played["data"]["observation"]["rewards"] == step.rewards
    assert played["data"]["reward"] == pytest.approx(sum(step.rewards.values()) / len(game.agents))
    assert played["data"]["done"] == step.done
    assert state["data"] == {"episode_id": "mine", "step_count": 1}


def test_replies_of_other_agents_than_those_due_are_no_action(export: Callable[..., Exported]) -> None:
    """A client lets the policy try again, as after any reply that is no action; the episode has not failed."""
    url = export("coordination", "math").url
    replies: list[dict[str, str]] = [{"row": "C"}, {"row": "C", "colum": "C"}, {}, {"row": "C", "column": "C"}]
    steps = [{"type": "step", "data": {"messages": messages}} for messages in (*replies, replies[0])]
    _, *refused, played, late = talk(f"{url}/coordination", {"type": "reset", "data": {"index": 5}}, *steps)
    assert [answer["data"]["code"] for answer in (*refused, late)] == ["VALIDATION_ERROR"] * 4
    assert refused[0]["data"]["message"].endswith('give {"messages": {"row": TEXT, "column": TEXT}}')
    assert played["data"]["done"]
    assert late["data"]["message"] == "there is no episode, or it is over; send reset first"
    wrong = {"type": "step", "data": {"messages": {"wrong": "5"}}}
    assert talk(f"{url}/math", {"type": "reset", "data": {}}, wrong)[1]["data"]["code"] == "VALIDATION_ERROR"


def test_faults_have_the_codes_of_the_protocol(export: Callable[..., Exported]) -> None:
    server = export("scripted")
    answers = talk(
        server.url,
        "{",
        "[" * 100_000,
        {"type": "dance"},
        {"type": "step", "data": {"message": "go"}},
        {"type": "reset", "data": {"index": 10_000}},
        {"type": "reset", "data": {"split": "nowhere", "index": 3}},
        {"type": "step", "data": {"message": "raise"}},
        {"type": "reset", "data": 3},
        {"type": "reset", "data": {"seed": "x"}},
        {"type": "reset", "data": {"index": 1.5}},
        {"type": "reset", "data": {"seed": -3}},
    )
    assert [answer["data"].get("code") for answer in answers] == [
        "INVALID_JSON",
        "INVALID_JSON",
        "UNKNOWN_TYPE",
        "VALIDATION_ERROR",
        "EXECUTION_ERROR",
        None,
        "EXECUTION_ERROR",
        *["VALIDATION_ERROR"] * 4,
    ]
    assert answers[8]["data"]["message"] == "seed is 'x'; it must be a whole number, 0 or above"
    assert "the back end is away" in answers[6]["data"]["message"]
    eventually(lambda: not len(server.server.service.sessions), 60)
    environment = OpenEnvEnvironment(server.url)
    with pytest.raises(RemoteError, match="the back end is away"):
        conversation(environment, environment.tasks("train")[0], "raise")


def test_the_token_of_the_server_is_needed(export: Callable[..., Exported], tmp_path: Path) -> None:
    url = export("math", token="secret").url
    (tmp_path / "token").write_text("secret")
    allowed = OpenEnvEnvironment(url, token_file=str(tmp_path / "token"))
    assert conversation(allowed, allowed.tasks("train")[0])[0]
    refused = OpenEnvEnvironment(url)
    with pytest.raises(RemoteError, match="401"):
        conversation(refused, refused.tasks("train")[0])
    host, port = url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(b"GET /math/health HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xff\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 401"), "a header that is no UTF-8"


def test_a_page_of_another_site_plays_no_episode(export: Callable[..., Exported]) -> None:
    """Browsers let any page open a WebSocket to this machine, and name the page's site."""
    url = export("math").url
    assert talk(url, {"type": "state"}, headers={"Origin": "http://localhost:3000"})[0]["type"] == "state"
    for origin in ("https://evil.example", "null", "http://["):
        with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
            talk(url, {"type": "state"}, headers={"Origin": origin})
    asking = urllib.request.Request(f"{url}/health", headers={"Origin": "https://evil.example"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asking, timeout=30)
    assert refused.value.read().startswith(b"Origin 'https://evil.example' is a page of another machine; open it at l")


def test_a_malformed_request_is_not_logged_as_an_error(
    export: Callable[..., Exported], caplog: pytest.LogCaptureFixture
) -> None:
    server_logger.filters.clear()  # of other servers of this process
    host, port = export("math").url.split("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:
        raw.sendall(b"BREW / HTTP/9.9\r\n\r\n")
        assert b" 400 " in raw.recv(100)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_client_that_leaves_during_an_answer_costs_neither_memory_nor_a_traceback(
    export: Callable[..., Exported], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2**23  # more than the buffers of sockets hold

    class Wordy(Scripted):
        def step(self, actions: Any) -> Step:
            return Step(observations={"agent": (Message("user", "x" * size),)}, rewards={"agent": 0.0})

    def frame(message: dict[str, Any]) -> bytes:
        text = json.dumps(message).encode()
        return bytes([0x81, 0x80 | len(text)]) + bytes(4) + text

    monkeypatch.setitem(OFFERED, "wordy", lambda settings: Wordy())
    exported = export("wordy")
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13"
    head = f"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}\r\n\r\n"
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        with socket.create_connection(("127.0.0.1", exported.openenv.port), timeout=60) as raw:
            step = {"type": "step", "data": {"message": "go"}}
            raw.sendall(head.encode() + frame({"type": "reset", "data": {"seed": 0}}) + frame(step))
            received = 0
            while received < size // 100:
                received += len(raw.recv(4096))
        eventually(lambda: exported.server.service.sessions.opened_total and not exported.server.service.sessions)
        assert tracemalloc.get_traced_memory()[0] < 3 * size, "a thread holds the result of its last call"
    finally:
        tracemalloc.stop()
        gc.enable()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_ping_is_answered_while_the_agent_decides_and_the_last_observation_may_be_empty() -> None:
    answered = threading.Event()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        for done in (False, True):
            await socket.receive()
            seen = {} if done else {"text": "Q"}
            await socket.send_json({"data": {"observation": seen, "done": done}, "type": "observation"})
            if not done:
                await socket.ping()
                assert (await socket.receive()).type is WSMsgType.PONG
                answered.set()
        return socket

    async def start() -> tuple[web.AppRunner, int]:
        application = web.Application()
        application.router.add_get("/ws", serve)
        runner = web.AppRunner(application, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, runner.addresses[0][1]

    async def play() -> Step:
        await environment.reset(environment.tasks("train")[0])
        assert await asyncio.to_thread(answered.wait, 60), "a server would end the connection"
        return await environment.step({"agent": Message("assistant", "7")})

    loop = EventLoopThread()
    runner, port = loop.submit(start()).result(60)
    environment = OpenEnvEnvironment(f"http://127.0.0.1:{port}", action="message", observation="{text}")
    try:
        assert asyncio.run(play()).done
    finally:
        environment.close()
        loop.submit(runner.cleanup()).result(60)
        loop.close()


@pytest.mark.parametrize("further", [[], [{"type": "state"}]])
def test_a_ping_is_answered_during_a_step(
    further: list[dict[str, Any]], export: Callable[..., Exported], monkeypatch: pytest.MonkeyPatch
) -> None:
    ponged = threading.Event()

    class Slow(Scripted):
        def step(self, actions: Any) -> Step:
            assert ponged.wait(60), "a client would end the connection"
            return Step(rewards={"agent": 1.0}, done=True, stop_reason="answered")

    async def play(url: str) -> Any:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{url}/ws", autoping=False) as socket:
            await socket.send_json({"type": "reset", "data": {"seed": 0}})
            await socket.receive_json()
            for message in ({"type": "step", "data": {"message": "go"}}, *further):
                await socket.send_json(message)
            await socket.ping()
            assert (await socket.receive(timeout=60)).type is WSMsgType.PONG
            ponged.set()
            return await socket.receive_json(timeout=60)

    monkeypatch.setitem(OFFERED, "slow", lambda settings: Slow())
    assert asyncio.run(play(export("slow").url))["data"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("observation", "shown"),
    [
        ({"text": "Q", "hint": None, "reward": 0.0}, "Q"),
        ({"text": "Q", "left": 3}, '{"text": "Q", "left": 3}'),
        ({"tool_name": "read", "result": {"data": "Q"}}, '{"tool_name": "read", "result": {"data": "Q"}}'),
    ],
    ids=str,
)
def test_no_field_of_an_observation_is_hidden(observation: dict[str, Any], shown: str) -> None:
    environment = OpenEnvEnvironment("http://127.0.0.1:8000")
    assert environment._as_messages({"observation": observation}) == [Message("user", shown)]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match="give http://HOST:PORT"):
        OpenEnvEnvironment("127.0.0.1:8000")
    with pytest.raises(ConfigurationError, match="max_turns is 0"):
        OpenEnvEnvironment("http://127.0.0.1:8000", max_turns=0)
    away = OpenEnvEnvironment(f"http://{nowhere()}")
    with pytest.raises(RemoteError, match="Cannot connect"):
        conversation(away, away.tasks("train")[0])
    encrypted = EnvironmentServer(Offer({}, 0, 1.0), Endpoint(identity=Identity("certificate", "key")))
    with pytest.raises(ConfigurationError, match="it has no TLS"):
        OpenEnvServer(encrypted, 0)


@pytest.mark.long
def test_the_command_serves_both_protocols() -> None:
    server = ServerProcess(
        arguments=["-m", "mrlm_pl.cli.main", "serve", "--environments", "math", "--port", "0", "--openenv_port", "0"]
    )
    try:
        assert server.process.stdout is not None
        line = server.process.stdout.readline().split()
        assert line[:2] == ["OpenEnv", "on"]
        environment = OpenEnvEnvironment(line[2])
        assert conversation(environment, environment.tasks("train")[0])[0]
    finally:
        server.process.terminate()
    assert server.process.wait(60) == 0


THEIR_CLIENT = """
import json, sys
from openenv import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    first = env.reset(seed=3)
    wrong = env.step({"message": "no number"})
    right = env.step({"message": sys.argv[2]})
    print(json.dumps([first.observation["text"], wrong.reward, wrong.done, right.reward, right.done, env.state()]))
"""


@pytest.fixture
def theirs() -> Path:
    if not OPENENV.exists():
        pytest.skip("openenv is not installed; run `make openenv`")
    return OPENENV / "python"


@pytest.mark.slow
def test_their_client_plays_on_our_server(export: Callable[..., Exported], theirs: Path) -> None:
    url = export("math", "coordination").url + "/math"
    native = OFFERED["math"]({})
    task = native.tasks("train")[3]
    command = [str(theirs), "-c", THEIR_CLIENT, url, task.data["answer"]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    text, *played, state = json.loads(run.stdout)
    assert text == "\n\n".join(message.content for message in native.reset(task)["agent"])
    assert played == [-0.3, False, 1.0, True]
    assert state["step_count"] == 2


@pytest.fixture
def echo(theirs: Path) -> Iterator[str]:
    """Return the address of the echo server that ``openenv init`` writes."""
    with echo_server() as url:
        yield url


@pytest.mark.slow
def test_our_client_plays_on_their_server(echo: str) -> None:
    environment = OpenEnvEnvironment(echo, observation="{echoed_message} ({message_length})", max_turns=3)
    first, steps = conversation(environment, environment.tasks("train")[0], "Hello", "a longer message", "")
    assert first == [Message("user", "Echo Env environment ready! (0)")]
    assert [step.rewards["agent"] for step in steps] == pytest.approx([0.5, 1.0, 0.0])  # a tenth per character, to 1
    assert steps[0].observations == {"agent": [Message("user", "Hello (5)")]}
    assert [step.done for step in steps] == [False, False, True]
    assert steps[2].truncated
    rows = [{"seed": n, "episode_id": f"mine-{n}"} for n in range(40)]
    for tried in (
        environment,
        OpenEnvEnvironment(echo, max_turns=2),
        OpenEnvEnvironment(echo, data=rows, action="message", max_turns=1),
    ):
        check_environment(tried, tasks_per_split=3).raise_on_failure()


@pytest.mark.slow
def test_a_full_server_is_waited_for_and_named(echo: str) -> None:
    held, others = OpenEnvEnvironment(echo), [OpenEnvEnvironment(echo, message_seconds=3.0) for _ in range(2)]
    task = held.tasks("train")[0]
    for environment in (held, others[0]):  # it allows two sessions
        asyncio.run(environment.reset(task))
    with pytest.raises(RemoteError, match="CAPACITY_REACHED"):
        asyncio.run(others[1].reset(task))
    held.close()
    asyncio.run(others[1].reset(task))
    for environment in others:
        environment.close()


PUZZLES = """
import reasoning_gym
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

class Puzzles(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("puzzles")
        tools.tool(self.read)
        tools.tool(self.submit)
        super().__init__(tools)

    def read(self) -> str:
        return self.entry["question"]

    def submit(self, answer: str) -> float:
        self.score = self.puzzles.score_answer(answer, self.entry)
        return self.score

    def reset(self, seed=None, episode_id=None, generator="gcd", **settings):
        self.puzzles = reasoning_gym.create_dataset(generator, size=1, seed=seed, **settings)
        (self.entry,), self.score, self.kept = self.puzzles, None, State(episode_id=episode_id)
        return Observation(metadata={"generator": generator})

    def step(self, action, timeout_s=None, **options):
        return self.judged(super().step(action, timeout_s, **options))

    async def step_async(self, action, timeout_s=None, **options):
        return self.judged(await super().step_async(action, timeout_s, **options))

    def judged(self, observation):
        self.kept.step_count += 1
        observation.done, observation.reward = self.score is not None, self.score or 0.0
        return observation

    def _step_impl(self, action, timeout_s=None, **options):
        raise ValueError("only tools are actions")

    @property
    def state(self):
        return self.kept

app = create_app(Puzzles, CallToolAction, CallToolObservation, max_concurrent_envs=2)
"""


@pytest.fixture
def puzzles(theirs: Path, tmp_path: Path) -> Iterator[str]:
    """Return the address of reasoning-gym's generators behind OpenEnv's server, as tools."""
    if subprocess.run([str(theirs), "-c", "import reasoning_gym"], capture_output=True).returncode:
        pytest.skip("reasoning-gym is not installed beside openenv; remove .venv-openenv and run `make openenv`")
    (tmp_path / "puzzles.py").write_text(PUZZLES)
    with openenv_server("puzzles:app", tmp_path) as url:
        yield url


@pytest.mark.slow
def test_real_tasks_behind_their_server_keep_the_contract_and_score_as_in_the_library(puzzles: str) -> None:
    for generator in ("basic_arithmetic", "spell_backward", "gcd"):
        rows = [{"generator": generator, "seed": seed} for seed in range(40)]
        environment = OpenEnvEnvironment(puzzles, data=rows, max_turns=4)
        check_environment(environment, tasks_per_split=3).raise_on_failure()
        task = environment.tasks("train")[0]
        library = reasoning_gym.create_dataset(generator, size=1, seed=task.data["seed"])
        (entry,) = library
        for answer in (entry["answer"], "none"):
            asked: list[dict[str, Any]] = [
                {"type": "list_tools"},
                {"type": "call_tool", "tool_name": "read", "arguments": {}},
                {"type": "call_tool", "tool_name": "submit", "arguments": {"answer": answer}},
            ]
            _, (listed, shown, judged) = conversation(environment, task, *map(json.dumps, asked))
            tools = json.loads(listed.observations["agent"][0].content)["tools"]
            assert {tool["name"] for tool in tools} == {"read", "submit"}
            result = json.loads(shown.observations["agent"][0].content)["result"]
            assert result["data"] == entry["question"]
            assert (shown.rewards["agent"], shown.done) == (0.0, False)
            assert (judged.rewards["agent"], judged.done) == (library.score_answer(answer, entry), True)
