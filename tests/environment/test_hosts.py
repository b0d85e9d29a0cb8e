from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.environment import Outcome, SingleAgentEnvironment
from mrlm_pl.environment.hosts import EnvironmentHosts, _serve
from mrlm_pl.episode import Message
from mrlm_pl.errors import EnvironmentContractError
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from tests.rollout.test_player import ScriptedEngine, seats
from tests.support.servers.hosted_environments import Hosted


def test_episodes_are_the_same_in_other_processes(tmp_path: Path) -> None:
    environment = Hosted(str(tmp_path))
    specs = [EpisodeSpec(f"e{n}", environment.tasks("train")[n], "g", seed=n) for n in range(6)]
    player = EpisodePlayer({"hosted": environment}, seats("agent"), ScriptedEngine(), processes=2)
    episodes = player.play_blocking(specs)
    player.close()
    player.close()
    assert [episode.reward for episode in episodes] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    processes = {episode.rows()[0].messages[0].content.split()[1] for episode in episodes}
    assert len(processes) == 2
    assert str(os.getpid()) not in processes


def test_a_host_that_dies_hangs_or_raises_costs_a_retry_and_no_episode(tmp_path: Path) -> None:
    environment = Hosted(str(tmp_path), misbehave=True)
    specs = [EpisodeSpec(f"e{n}", environment.tasks("train")[n], "g", seed=n) for n in range(5)]
    player = EpisodePlayer(
        {"hosted": environment}, seats("agent"), ScriptedEngine(), processes=2, step_timeout=5.0, retries=5
    )
    episodes = player.play_blocking(specs)
    player.close()
    assert [episode.error for episode in episodes] == [None] * 5
    assert [episode.reward for episode in episodes] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert min(episodes[n].attempts for n in (1, 2, 3)) >= 2


def test_a_step_after_its_host_was_stopped_is_an_error_and_a_reset_takes_another_host(tmp_path: Path) -> None:
    hosts = EnvironmentHosts(1, 60.0)
    task = (environment := hosts.host(Hosted(str(tmp_path)))).tasks("train")[0]
    environment.reset(task)
    hosts.close()
    with pytest.raises(ConnectionError, match="died or was stopped"):
        environment.step({"agent": Message("assistant", "0")})
    environment.reset(task)
    hosts.close()


def test_a_late_step_names_the_deadline_of_a_run_and_of_a_server(tmp_path: Path) -> None:
    hosts = EnvironmentHosts(1, 60.0)
    task = (environment := hosts.host(Hosted(str(tmp_path), misbehave=True))).tasks("train")[2]
    environment.reset(task)
    environment._host.timeout = 0.5  # the step sleeps for ten minutes
    with pytest.raises(TimeoutError, match=r"0\.5 s .*\(`step_timeout`, on a server `step_seconds`\)"):
        environment.step({"agent": Message("assistant", "0")})
    hosts.close()


def test_an_environment_that_no_host_can_make_is_closed_without_an_error(tmp_path: Path) -> None:
    hosts = EnvironmentHosts(1, 60.0)
    environment = hosts.host(Hosted(str(tmp_path)))
    environment._packed = b"no pickle"
    with pytest.raises(pickle.UnpicklingError):
        environment.reset(environment.tasks("train")[0])
    environment.close()
    hosts.close()


class Locked:
    def step(self, _: Any) -> Any:
        return threading.Lock()


def test_an_answer_that_cannot_be_pickled_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send((0, "make", pickle.dumps(Locked())))
    ours.send((0, "step", None))
    serving = threading.Thread(target=_serve, args=(theirs,))
    serving.start()
    assert ours.recv() == (False, None)
    failed, error = ours.recv()
    ours.close()
    serving.join()
    assert failed
    assert isinstance(error, EnvironmentContractError)
    assert re.fullmatch(r"<unlocked .* cannot be sent between processes: cannot pickle .*", str(error)), error


def test_an_environment_that_cannot_be_pickled_is_refused() -> None:
    class Local(SingleAgentEnvironment):
        name = "local"

        def tasks(self, split: str):
            raise AssertionError

        def begin(self, task: object) -> str:
            raise AssertionError

        def reply(self, message: Message) -> Outcome:
            raise AssertionError

    with pytest.raises(EnvironmentContractError, match=r"data\.processes to 0"):
        EnvironmentHosts(1, 1.0).host(Local())
