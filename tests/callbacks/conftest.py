"""A quick two-player game for self-play."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_callbacks import AnchorGames, SelfPlay

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy


class Duel(Environment):
    """Both speak at once; who says more digits wins 1. With ``perverse`` the tasks of training pay the opposite."""

    name = "duel"
    agents = ("near", "far")

    def __init__(self, perverse: bool = False) -> None:
        self.perverse = perverse

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": f"{split[0]}{n}"} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.sign = -1 if self.perverse and task.split == "train" else 1
        return {agent: [Message("user", f"Say {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        near, far = (self.sign * sum(map(str.isdigit, actions[agent].content)) for agent in self.agents)
        won = float(near > far) - float(near < far)
        return Step(rewards={"near": won, "far": -won}, done=True, stop_reason="compared")


def policies_of(model_folder: Path, **learner: Any) -> dict[str, Policy]:
    return {
        "learner": Policy(str(model_folder), **{"learning_rate": 1e-2, **learner}),
        "opponent": Policy(str(model_folder), trained=False),
    }


@pytest.fixture
def duel(model_folder: Path) -> Any:
    """A factory of an algorithm, data and the callback, for a run of self-play."""

    def make(
        data: Mapping[str, Any] | None = None, learner: Mapping[str, Any] | None = None, **options: Any
    ) -> tuple[GRPO, RolloutDataModule, SelfPlay]:
        perverse = options.pop("perverse", False)
        algorithm = GRPO(policies_of(model_folder, **(learner or {})), seats={"near": "learner", "far": "opponent"})
        settings = {"groups": 2, "group_size": 6, "iterations": 5, "sampling": Sampling(max_tokens=6), **(data or {})}
        settings["save_episodes"] = False
        callback = SelfPlay(**{"snapshot_every": 2, "anchors": AnchorGames(every=2, games=8), **options})
        return algorithm, RolloutDataModule(Duel(perverse), **settings), callback

    return make
