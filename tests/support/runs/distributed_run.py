"""Runs of several processes for tests: each trains on rollouts and writes the data of each rank to a folder.

python -m tests.support.runs.distributed_run MODEL_FOLDER FOLDER JSON_OPTIONS [FOLDER JSON_OPTIONS ...]

Several runs share the processes, whose start takes longer than the training.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_callbacks import HeldOutEvaluation

from mrlm_pl.algorithms import (
    C3,
    CCPO,
    DPO,
    GRPO,
    IPPO,
    MADPO,
    MAGRPO,
    MAPPO,
    MAREMAX,
    PPO,
    RAE,
    SFT,
    CorrectnessModel,
    DrMAS,
    MAPoRL,
    OnPolicyDistillation,
    Shapley,
    TreeGRPO,
)
from mrlm_pl.algorithms import PairwiseRewardModel as Pairwise
from mrlm_pl.data import (
    AnswerDataModule,
    JointPreferenceDataModule,
    PreferenceDataModule,
    RolloutDataModule,
    TrajectoryDataModule,
)
from mrlm_pl.data.rollout.tasks import SuccessRateCurriculum, TaskSettings
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.sharding import whole
from mrlm_pl.rollout.cross_policy import CrossPolicy
from mrlm_pl.trainer.fsdp import FSDP
from tests.conftest import EchoEnvironment
from tests.support.environments.discussion import Discussion


class OneOfTwo(Environment):
    """Pose each task to one of two agents, and reward the digits in its reply."""

    name = "one_of_two"
    agents = ("left", "right")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.agent = self.agents[task.data["n"] % 2]
        return {self.agent: [Message("user", f"Say {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        digits = sum(letter.isdigit() for letter in actions[self.agent].content)
        return Step(rewards={self.agent: float(digits)}, done=True, stop_reason="end")


class Duet(Environment):
    """Let both agents act simultaneously for two turns, and reward both with the fraction of digits."""

    name = "duet"
    agents = ("left", "right")
    forks = True

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(16)])

    def reset(self, task: Task) -> Observations:
        self.turns = 2
        return {agent: [Message("user", f"Say {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.turns -= 1
        text = "".join(message.content for message in actions.values())
        rewards = dict.fromkeys(self.agents, sum(map(str.isdigit, text)) / max(len(text), 1))
        if not self.turns:
            return Step(rewards=rewards, done=True, stop_reason="end")
        return Step({agent: [Message("user", "More")] for agent in self.agents}, rewards)


class Fails(lightning.Callback):
    """Raise on one rank while the others are in the next collective."""

    def on_train_batch_start(self, trainer: Any, algorithm: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1:
            raise RuntimeError("the disk is full")


class Record(lightning.Callback):
    """Write the first update's gradients and the data of the rank's rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = False

    def on_before_optimizer_step(self, trainer: Any, algorithm: Any, optimizer: Any) -> None:
        gradients = {
            name: whole(weight.grad).clone() for name, weight in algorithm.named_parameters() if weight.grad is not None
        }
        if not self.written and trainer.is_global_zero:
            torch.save(gradients, self.folder / "gradients.pt")
        self.written = True

    def on_train_end(self, trainer: Any, algorithm: Any) -> None:
        numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
        (self.folder / f"metrics-{trainer.global_rank}.json").write_text(json.dumps(numbers))


def main(folder: Path, model_folder: str, options: dict[str, Any]) -> None:
    """Run one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    known = (GRPO, PPO, IPPO, MAPPO, DPO, SFT, MAGRPO, MAREMAX, MADPO, RAE, DrMAS, MAPoRL, C3, TreeGRPO)
    known = (*known, CCPO, Shapley, OnPolicyDistillation)
    classes = {cls.__name__.lower(): cls for cls in known} | {"dr_mas": DrMAS}
    classes |= {"pairwise": Pairwise, "correctness": CorrectnessModel}
    policies = {
        name: Policy(
            model_folder,
            learning_rate=1e-3,
            lora=LoRA(rank=2) if options.get("lora") else None,
            max_forward_tokens=options.get("max_forward_tokens"),
            gradient_checkpointing=options.get("gradient_checkpointing", False),
        )
        for name in options.get("policies", ["main"])
    }
    critics: dict[str, Any] = {}
    if "critics" in options:
        critics["agent_critics"] = {name: Policy(model_folder, learning_rate=1e-3) for name in options["critics"]}
    algorithm = classes[options.get("algorithm", "grpo")](policies, **critics, **options.get("model", {}))
    data: Any
    if options.get("algorithm") in ("dpo", "pairwise"):
        data = PreferenceDataModule(options["pairs"], options["pairs"], batch_size=options["batch_size"])
    elif options.get("algorithm") == "madpo":
        data = JointPreferenceDataModule(options["pairs"], options["pairs"], batch_size=options["batch_size"])
    elif options.get("algorithm") == "correctness":
        data = AnswerDataModule(options["rows"], options["rows"], batch_size=options["batch_size"])
    elif options.get("algorithm") == "sft":
        data = TrajectoryDataModule(options["rows"], options["rows"], batch_size=options["batch_size"])
    else:
        settings = {"groups": 4, "group_size": 3, "iterations": 2, "validation_episodes": 5, **options.get("data", {})}
        if "cross_policy" in settings:
            settings["cross_policy"] = CrossPolicy(**settings["cross_policy"])
        flat = options.get("flat") and os.environ.get("LOCAL_RANK") == "1"
        environment: Any = EchoEnvironment(turns=2, reward=1.0 if flat else None)
        if "policies" in options:
            environment = Duet() if options.get("duet") else OneOfTwo()
        if "discussion" in options:
            environment = Discussion(**options["discussion"])
        if options.get("levels"):
            environment = [EchoEnvironment(), EchoEnvironment(turns=2, fail_every=5)]
            settings["names"], settings["curriculum"] = ["short", "long"], SuccessRateCurriculum()
            settings["task_settings"] = {"long": TaskSettings(group_size=4, reward_scale=10.0)}
        data = RolloutDataModule(environment, sampling=Sampling(max_tokens=options.get("max_tokens", 9)), **settings)
    tensor_parallel = options.get("tensor_parallel", 1)
    strategy = options.get("strategy", "auto")
    extra = {
        "held_out": lambda: HeldOutEvaluation(episodes=5),
        "fails": Fails,
        "keep": lambda: ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1),
    }
    callbacks = options.get("callbacks", [])
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.get("devices", 1),
        strategy=FSDP(tensor_parallel, options.get("sharded", False)) if strategy == "fsdp" else strategy,
        max_epochs=options.get("epochs", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        gradient_clip_val=options.get("clip"),
        accumulate_grad_batches=options.get("accumulate", 1),
        default_root_dir=folder,
        limit_train_batches=options.get("limit", 1.0),
        callbacks=[Record(folder), *(extra[name]() for name in callbacks)],
        enable_checkpointing="keep" in callbacks,
    )
    trainer.fit(algorithm, data, ckpt_path=options.get("resume"))
    if options.get("save"):
        trainer.save_checkpoint(options["save"])
    if options.get("others"):
        others = PreferenceDataModule(options["pairs"], options["others"], batch_size=options["batch_size"])
        (found,) = trainer.validate(algorithm, others, ckpt_path=options["save"], verbose=False)
        (folder / f"others-{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for run_folder, run_options in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        main(Path(run_folder), sys.argv[1], json.loads(run_options))
