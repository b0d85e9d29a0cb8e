"""Training runs in this process that are rewarded by a verifier on a server, which is killed meanwhile."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import RolloutError
from mrlm_pl.policy import Policy
from mrlm_pl.reward_models import TextScorer
from mrlm_pl.serving.verifiers import VerifierClient
from tests.support.models.verifier_models import tiny
from tests.support.servers.environment_servers import ServerProcess
from tests.support.servers.served_training import episodes

SERVER = ("-m", "tests.support.servers.verifier_servers")
ITERATIONS, GROUPS, GROUP_SIZE, TURNS = 3, 2, 4, 2
EPISODES, STEPS = ITERATIONS * GROUPS * GROUP_SIZE, ITERATIONS * GROUPS * GROUP_SIZE * TURNS


class Verified(SingleAgentEnvironment):
    """Rewards each of two replies with its score; calls ``trouble`` before each score."""

    name = "verified"
    trouble: Callable[[int], None] = staticmethod(lambda number: None)
    asked: Counter[str] = Counter()  # noqa: RUF012 (shared by all instances on purpose)
    paid: Counter[str] = Counter()  # noqa: RUF012
    lock = threading.Lock()

    def __init__(self, scorer: TextScorer) -> None:
        self.scorer = scorer

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def begin(self, task: Task) -> str:
        self.left = TURNS
        self.question = f"Say {task.data['n']}"
        return self.question

    def reply(self, message: Message) -> Outcome:
        key = f"{self.question} {message.content} {self.left}"
        with self.lock:
            self.asked[key] += 1
            number = self.asked.total()
        self.trouble(number)
        (value,) = self.scorer.score_texts([self.question], [message.content])
        with self.lock:
            self.paid[key] += 1
        self.left -= 1
        return Outcome({"score": value}, "More" if self.left else None, success=value > 0.5)


@dataclass
class Run:
    """Results of a run."""

    weights: dict[str, torch.Tensor]
    tokens: list[list[int]]
    rewards: list[float]
    attempts: list[int]
    errors: list[str | None]
    asked: Counter[str]
    paid: Counter[str]

    def equals(self, other: Run) -> bool:
        """Return whether episodes, rewards and weights are the same, bit for bit."""
        same = all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())
        return same and (self.tokens, self.rewards) == (other.tokens, other.rewards)


class Killer:
    """A server that can be killed, and is started again on its port some time later.

    Args:
        start: starts a server, given a port; 0 is a free one.
        away: seconds for which it is gone; None leaves it so.
    """

    def __init__(self, start: Callable[[int], ServerProcess], away: float | None) -> None:
        self.start, self.away = start, away
        self.server = start(0)
        self.target, self.kills = self.server.target, 0
        self.thread = threading.Thread()

    def kill(self) -> None:
        self.server.send(signal.SIGKILL)
        self.server.process.wait(100)
        self.kills += 1
        if self.away is not None:
            self.thread = threading.Thread(target=self._restart)
            self.thread.start()

    def _restart(self) -> None:
        assert self.away is not None
        time.sleep(self.away)
        self.server = self.start(self.server.port)


@pytest.fixture
def killer(process: Any) -> Iterator[Callable[..., Killer]]:
    """Starts servers of the share of digits that can be killed."""
    made: list[Killer] = []

    def make(away: float | None = 0.7, *arguments: str) -> Killer:
        words = arguments or SERVER
        ports = (lambda port: ["--port", str(port)]) if arguments else (lambda port: [str(port)])
        made.append(Killer(lambda port: process(*words, *ports(port)), away))
        return made[-1]

    yield make
    for item in made:
        if item.thread.ident is not None:
            item.thread.join()


@pytest.fixture
def train(model_folder: Path, tmp_path: Path, quiet_trainer: Any) -> Callable[..., Run]:
    """Train with a client of some servers; call ``trouble`` before each score."""

    def run(name: str, target: str, trouble: Callable[[int], None], patience: float = 60.0, **options: Any) -> Run:
        Verified.asked, Verified.paid, Verified.trouble = Counter(), Counter(), staticmethod(trouble)
        scorer = VerifierClient(target, timeout_seconds=30.0, patience_seconds=patience)
        sizes = {"groups": GROUPS, "group_size": GROUP_SIZE, "iterations": ITERATIONS, "step_timeout": 90.0, **options}
        data = RolloutDataModule(Verified(scorer), sampling=Sampling(max_tokens=6), **sizes)
        algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
        quiet_trainer(default_root_dir=tmp_path / name).fit(algorithm, data)
        found = episodes(tmp_path / name)
        rows = [row for episode in found for rows in episode["trajectories"].values() for row in rows]
        return Run(
            {key: weight.clone() for key, weight in algorithm.policy("main").model.state_dict().items()},
            [row["token_ids"] for row in rows],
            [turn["reward"] for row in rows for turn in row["turns"]],
            [episode["attempts"] for episode in found],
            [episode["error"] for episode in found],
            Verified.asked,
            Verified.paid,
        )

    return run


def check(run: Run, undisturbed: Run) -> None:
    """Check that a run with trouble equals one without: no score is lost or doubled."""
    assert run.attempts == [1] * EPISODES
    assert run.errors == [None] * EPISODES
    assert run.asked == run.paid == undisturbed.paid
    assert run.paid.total() == len(run.rewards) == STEPS
    assert run.equals(undisturbed)
    assert len(set(run.rewards)) > 3, "the scores tell replies apart"


@pytest.mark.long
def test_a_server_that_is_killed_and_started_again_costs_nothing(killer: Any, train: Any) -> None:
    server: Killer = killer()
    undisturbed = train("undisturbed", server.target, lambda number: None)
    run = train("disturbed", server.target, lambda number: server.kill() if number in (STEPS // 3, STEPS - 5) else None)
    assert server.kills == 2
    check(run, undisturbed)


@pytest.mark.slow
def test_a_server_that_stands_still_costs_nothing_but_time(killer: Any, train: Any) -> None:
    server: Killer = killer(None)
    undisturbed = train("undisturbed", server.target, lambda number: None)

    def trouble(number: int) -> None:
        if number == STEPS // 2:
            server.server.send(signal.SIGSTOP)
            threading.Timer(1.0, lambda: server.server.send(signal.SIGCONT)).start()

    check(train("disturbed", server.target, trouble), undisturbed)


@pytest.mark.long
def test_a_server_that_does_not_come_back_ends_the_run_with_the_reason(killer: Any, train: Any, tmp_path: Path) -> None:
    server: Killer = killer(None)
    first = GROUPS * GROUP_SIZE * TURNS
    times = []

    def trouble(number: int) -> None:
        if number == first + 3:
            server.kill()
            times.append(time.monotonic())

    with pytest.raises(RolloutError, match=rf"no verifier at {server.target} gave scores within 3 s; start it again"):
        train("gone", server.target, trouble, patience=3.0, retries=0)
    assert time.monotonic() - times[0] < 60, "it does not hang"
    found = episodes(tmp_path / "gone")
    before, after = found[: GROUPS * GROUP_SIZE], found[GROUPS * GROUP_SIZE :]
    assert [episode["error"] for episode in before] == [None] * len(before)
    assert len(after) == len(before)
    assert all("no verifier at" in episode["error"] for episode in after)


@pytest.mark.slow
def test_episodes_that_fail_are_told_and_not_paid(killer: Any, train: Any) -> None:
    server: Killer = killer(2.5)
    first = GROUPS * GROUP_SIZE * TURNS
    run = train("some", server.target, lambda n: server.kill() if n == first + 3 else None, patience=0.5, retries=8)
    assert run.errors == [None] * EPISODES, "they were played again, until the server was back"
    assert max(run.attempts) > 1


@pytest.mark.slow
def test_a_model_that_is_killed_three_times(killer: Any, train: Any, tmp_path: Path) -> None:
    tiny(tmp_path / "model", "value")
    serving = ("-m", "mrlm_pl.cli.main", "serve", "--verifier", str(tmp_path / "model"))
    server: Killer = killer(0.5, *serving)
    undisturbed = train("undisturbed", server.target, lambda number: None)
    run = train("disturbed", server.target, lambda n: server.kill() if n in (5, STEPS // 2, STEPS - 3) else None)
    assert server.kills == 3
    check(run, undisturbed)
