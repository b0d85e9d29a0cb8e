"""Environments of verifiers, which `make verifiers` installs beside a server of ours without torch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from mrlm_environments import VerifiersEnvironment

from mrlm_pl.environment import Message, Step
from mrlm_pl.environment.check import check_environment
from mrlm_pl.errors import ConfigurationError, RemoteError
from mrlm_pl.serving import RemoteEnvironment
from tests.support.servers.environment_servers import played
from tests.support.servers.foreign_servers import ROOT, VERIFIERS, verifiers_server

USERS = '{"id": "user-sim", "user": {"max_turns": 3}}'
PRODUCTS = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Product(vf.Task[Data]):
    @vf.reward
    async def near(self, trace) -> float:
        said = trace.last_reply.strip()
        is_number = said.isascii() and said.isdecimal() and len(said) < 9
        return 1 / (1 + abs(int(said) - self.data.answer)) if is_number else 0.0

class Products(vf.Taskset[Product, vf.TasksetConfig]):
    def load(self):
        rows = [Data(prompt=f"{a} * {b} = ?", answer=a * b) for a in range(2, 9) for b in range(2, 9)]
        return [Product(row, self.config.task) for row in rows]

__all__ = ["Products"]
"""
FAILING = """
import verifiers.v1 as vf

class Broken(vf.Task[vf.TaskData]):
    @vf.reward
    async def scored(self, trace) -> float:
        raise OSError("the judge is away")

class BrokenTaskset(vf.Taskset[Broken, vf.TasksetConfig]):
    def load(self):
        return [Broken(vf.TaskData(prompt=f"Say {n}."), self.config.task) for n in range(30)]

__all__ = ["BrokenTaskset"]
"""


def test_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigurationError, match="make verifiers"):
        VerifiersEnvironment("reverse_words")


@pytest.fixture
def serve() -> Iterator[Callable[..., RemoteEnvironment]]:
    """Return a client of an environment on a server in the virtual environment of verifiers."""
    if not VERIFIERS.exists():
        pytest.skip("verifiers is not installed; run `make verifiers`")
    with ExitStack() as servers:
        yield lambda *options, **folder: RemoteEnvironment(
            servers.enter_context(verifiers_server(*options, **folder)), "verifiers"
        )


def turn(environment: RemoteEnvironment, texts: dict[str, str]) -> Step:
    """Return the answer to a turn."""
    return asyncio.run(environment.step({agent: Message("assistant", text) for agent, text in texts.items()}))


@pytest.mark.slow
def test_the_reward_is_that_of_verifiers(serve: Callable[..., RemoteEnvironment]) -> None:
    environment = serve("reverse_words")
    check_environment(environment).raise_on_failure()
    task = next(task for task in environment.tasks("train") if task.data["task"]["prompt"] == "Reverse: goldtin")
    right = played(environment, "nitdlog", task=task)
    assert right.rewards == {"agent": 1.0}
    assert right.components == {"agent": {"exact": 0.8, "letters": pytest.approx(0.2)}}
    part = played(environment, "gold?", task=task)  # g, o, l, d of g, o, l, d, t, i, n and ?
    assert part.rewards == {"agent": pytest.approx(0.2 * 4 / 8)}
    assert (part.metrics, part.stop_reason) == ({"characters": 5.0}, "agent_completed")


@pytest.mark.slow
def test_the_seats_of_an_environment_are_agents(serve: Callable[..., RemoteEnvironment]) -> None:
    environment = serve("reverse_words", "--environment.config", USERS)
    check_environment(environment).raise_on_failure()
    assert environment.agents == ("assistant", "user")
    task = next(task for task in environment.tasks("train") if task.data["task"]["prompt"] == "Reverse: leadzinc")
    first = asyncio.run(environment.reset(task))
    assert "Reverse: leadzinc" in first["user"][0].content
    assert [turn(environment, {"user": "Please reverse leadzinc."}).observations["assistant"][-1].content] == [
        "Please reverse leadzinc."
    ]
    assert turn(environment, {"assistant": "Which word?"}).observations["user"][-1].content == "Which word?"
    assert turn(environment, {"user": "leadzinc"}).observations == {"assistant": (Message("user", "leadzinc"),)}
    assert turn(environment, {"assistant": "cnizdael"}).observations["user"][-1].content == "cnizdael"
    last = turn(environment, {"user": "###DONE###"})
    assert (last.rewards, last.done) == ({"assistant": 1.0, "user": 0}, True)


@pytest.mark.slow
def test_a_taskset_of_an_own_folder(serve: Callable[..., RemoteEnvironment], tmp_path: Path) -> None:
    (tmp_path / "products.py").write_text(PRODUCTS)
    environment = serve("products", folder=tmp_path)
    check_environment(environment).raise_on_failure()
    task = environment.tasks("train")[0]
    one, _, other, *_ = task.data["task"]["prompt"].split()
    right = int(one) * int(other)
    said = (str(right), str(right - 1), "x")
    assert [played(environment, reply, task=task).rewards["agent"] for reply in said] == [1.0, 0.5, 0.0]


@pytest.fixture
def word_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put words of TextArena's dictionary where NLTK keeps the lists that the games would download."""
    spec = find_spec("textarena")
    assert spec is not None
    assert spec.origin is not None
    entries = (Path(spec.origin).parent / "envs/utils/data/en_US.dic").read_text().splitlines()[1:]
    words = [word for entry in entries if (word := entry.partition("/")[0]).isascii() and word.islower()]
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    short = [word for word in words if 3 <= len(word) <= 5 and word.isalpha()]
    for name, chosen in (("en", short), ("en-basic", short[::7])):  # NLTK's basic list has 850 words
        (folder / name).write_text("\n".join(chosen))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("word_lists")
@pytest.mark.parametrize(
    "game",
    [
        "WordLadder-v0",
        "WordSearch-v0",
        "Hangman-v0",
    ],
)
def test_the_games_that_come_with_verifiers(serve: Callable[..., RemoteEnvironment], game: str) -> None:
    config = json.dumps({"taskset": {"game": game}, "player": {"max_turns": 3}})
    environment = serve("textarena", "--environment.config", config, "--environment.limit", "40")
    check_environment(environment, tasks_per_split=3).raise_on_failure()
    assert environment.agents == ("player",)


@pytest.mark.slow
def test_a_failure_in_verifiers_fails_the_episode(serve: Callable[..., RemoteEnvironment], tmp_path: Path) -> None:
    (tmp_path / "broken_rewards.py").write_text(FAILING)
    environment = serve("broken_rewards", folder=tmp_path)
    with pytest.raises(RemoteError, match="the judge is away"):
        played(environment, "1", task=environment.tasks("train")[0])


@pytest.mark.slow
@pytest.mark.skipif(not VERIFIERS.exists(), reason="verifiers is not installed; run `make verifiers`")
def test_a_missing_taskset_and_a_wrong_setting_are_named() -> None:
    for options, told in (
        (["reverse_wrods"], "taskset 'reverse_wrods' not found"),
        (["reverse_words", "--environment.config", '{"agent": {"max_turnz": 3}}'], "max_turnz"),
    ):
        words = ["serve", "--environment", "verifiers", "--port", "0", "--environment.taskset", *options]
        command, folder = [str(VERIFIERS / "mrlm"), *words], ROOT / "examples" / "adapters"
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        assert run.returncode == 2
        assert told in run.stderr
