"""Self-play at a fast two-player game, for tests.

python -m tests.support.environments.duel FOLDER MODEL_FOLDER trains on two processes and writes the final state of
each rank.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from mrlm_callbacks import AnchorGames, SelfPlay

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy


class Duel(Environment):
    """Let both act simultaneously; more digits win 1. With ``perverse``, training tasks reward the opposite."""

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


def make(
    model_folder: str,
    data: Mapping[str, Any] | None = None,
    learner: Mapping[str, Any] | None = None,
    perverse: bool = False,
    **options: Any,
) -> tuple[GRPO, RolloutDataModule, SelfPlay]:
    """Return the algorithm, the data and the callback of a self-play run."""
    policies = {
        "learner": Policy(model_folder, **{"learning_rate": 1e-2, **(learner or {})}),
        "opponent": Policy(model_folder, trained=False),
    }
    algorithm = GRPO(policies, seats={"near": "learner", "far": "opponent"})
    settings = {"groups": 2, "group_size": 6, "iterations": 5, "sampling": Sampling(max_tokens=6), **(data or {})}
    callback = SelfPlay(**{"snapshot_every": 2, "anchors": AnchorGames(every=2, games=8), **options})
    return algorithm, RolloutDataModule(Duel(perverse), save_episodes=False, **settings), callback


def main(folder: Path, model_folder: str) -> None:
    """Run one of two processes."""
    torch.set_num_threads(1)
    algorithm, data, callback = make(model_folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=folder,
        callbacks=[callback],
    )
    trainer.fit(algorithm, data)
    prints = {
        name: hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in policy.parameters())).hexdigest()
        for name, policy in algorithm.policies.items()
    }
    state = callback.state_dict()
    games = [[*pair, *found] for pair, found in state["table"].items()]
    held = {"weights": prints, "games": games, "drawn": state["drawn"], "scores": state["pool"]["scores"]}
    (folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(held))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
