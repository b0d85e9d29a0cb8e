"""The example and the configurations with environments of other libraries: they play, and they learn."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mrlm_environments import PettingZooEnvironment, TextArenaEnvironment

from mrlm_pl.environment import Message, Task
from tests.support.documents import ROOT

pytest.importorskip("pygame", reason="pygame-ce is not installed")
pytest.importorskip("textarena", reason="textarena is not installed")


def test_the_codecs_show_the_same_board(example: Callable[[str], ModuleType]) -> None:
    script = example("adapters/tic_tac_toe.py")
    zoo = PettingZooEnvironment("classic/tictactoe_v3", codec=script.BoardCodec(), prompt="")
    arena = TextArenaEnvironment("TicTacToe-v0", codec=script.LinesCodec())
    boards = []
    for game, (one, other) in ((zoo, zoo.agents), (arena, arena.agents)):
        shown = [game.reset(Task(game.name, "train", 0, 0, {"seed": 0, "first": one}))[one]]
        for agent, cell in ((one, 4), (other, 0), (one, 8)):
            step = game.step({agent: Message("assistant", str(cell))})
            shown += step.observations.values()
        boards.append([message.content for (message,) in shown])
    assert boards[0] == boards[1] == ["012/345/678", "012/3o5/678", "o12/3x5/678", "x12/3o5/67o"]


@pytest.mark.slow
def test_the_example_trains(example: Callable[[str], ModuleType], tmp_path: Path, capsys) -> None:
    example("adapters/tic_tac_toe.py").main(iterations=2, output=str(tmp_path))
    assert "scores against the initial policy: [0." in capsys.readouterr().out
    assert (tmp_path / "policies" / "learner" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gymnasium", "pettingzoo", "textarena"])
def test_the_configuration_learns(mrlm, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    status, _, errors = mrlm("fit", "--config", f"configs/tasks/adapters/{name}.yaml", "--output", str(run))
    assert status == 0, errors
    assert gain(run) > 0.25


def gain(run: Path) -> float:
    """Return the change of the score against the initial policy, else of the mean reward of five rollouts."""
    if (run / "self_play.json").exists():
        games = json.loads((run / "self_play.json").read_text())["anchors"]
        return games[-1]["score"] - games[0]["score"]
    with (run / "metrics.csv").open() as file:
        rewards = [float(row["rollout/reward"]) for row in csv.DictReader(file) if row["rollout/reward"]]
    return sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5
