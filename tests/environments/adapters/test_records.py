"""Episodes with other libraries' environments: recorded by the player, played again, and sent to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from mrlm_environments import GymnasiumEnvironment, PettingZooEnvironment, TextArenaEnvironment

from mrlm_pl.environment import Environment
from mrlm_pl.episode import Message
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.runs import replay
from tests.support.runs.recorded_episodes import recorded

pytest.importorskip("pygame", reason="pygame-ce is not installed")
pytest.importorskip("textarena", reason="textarena is not installed")

MAKERS: list[Callable[[], Environment]] = [
    lambda: GymnasiumEnvironment("FrozenLake-v1"),  # slippery
    lambda: PettingZooEnvironment("classic/tictactoe_v3"),
    lambda: PettingZooEnvironment("classic/rps_v2", parallel=True),
    lambda: TextArenaEnvironment("KuhnPoker-v0"),
]


@pytest.mark.parametrize("make", MAKERS)
def test_recorded_episodes_are_played_again_alike(make: Callable[[], Environment], tmp_path: Path) -> None:
    environment = make()
    played = recorded(environment, 8, gold=lambda task: {agent: list("1203") for agent in environment.agents})
    assert not any(episode.failed for episode in played)
    assert max(len(row.turns) for episode in played for row in episode.rows()) > 1
    write_episodes(tmp_path / "episodes.jsonl.gz", played)
    report = replay("builtin:tiny", make(), episodes=tmp_path / "episodes.jsonl.gz")
    assert (report.equal, report.changed) == (8, {})


@pytest.mark.parametrize("make", MAKERS)
def test_an_environment_is_sent_to_another_process_without_its_episode(make: Callable[[], Environment]) -> None:
    environment = make()
    task = environment.tasks("train")[0]
    first = environment.reset(task)
    sent = pickle.loads(pickle.dumps(environment))
    environment.step({agent: Message("assistant", "1") for agent in first})
    assert sent.reset(task) == first
    environment.close()
    sent.close()
