"""Step time and peak memory of team training: this project against CoMLRL's trainers on the same work, in one run.

    python benchmarks/team_step.py --peer-python .venv-peers-multi/bin/python [--algorithm magrpo] [--turns 1 2 3]

Two agents with a random Llama model each, from the same folder, in fp32 with AdamW: one task of 64 tokens, 4 decisions
of each agent in each state of 32 tokens (no token ends a turn), aligned joint actions, so 1, 5 or 21 states at 1, 2 or
3 turns; the next turn's prompt is everything so far and one more word. A step is one task: its whole tree, the rewards,
the gradients and the optimizer steps: one for each agent here, one for each agent and turn there. ``ippo`` (their IAC,
a critic for each agent) and ``mappo`` (their MAAC, one critic; here at 1 turn) have no trees: a step is one task with 4
decisions of each agent at 1 turn, and 4 tasks with one at more. Each side runs as a
process of its own, in turns; the first two steps are warm-up. Printed are medians and ratios of wall seconds, and the
peak memory of the processes beside that of one that only imports torch, transformers and Lightning.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grpo_step import SIZES, TEMPLATE, make_model, prompt, report, reward

GROUP, NEW_TOKENS, TASKS = 4, 32, 64
FURTHER = "w1"
FORWARD_TOKENS = 540
"""Rows are run through the model in chunks of so many tokens here: two states at most; CoMLRL runs them one by one."""
IMPORTS = "import lightning, torch, transformers, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def joint_reward(texts: list[str]) -> float:
    """Share of words with an even number in the texts of all agents."""
    return reward(" ".join(texts))


def tasks_in_step(algorithm: str, turns: int) -> int:
    """How many tasks a step is about."""
    return 1 if algorithm == "magrpo" or turns == 1 else GROUP


def run_ours(folder: str, size: str, turns: int, steps: int, algorithm: str) -> dict[str, Any]:
    """Step times and memory of this project."""
    import lightning
    import torch

    from mrlm_pl.algorithms import IPPO, MAGRPO, MAPPO
    from mrlm_pl.data import RolloutDataModule
    from mrlm_pl.engines import Sampling
    from mrlm_pl.environment import DatasetTasks, Environment, Step
    from mrlm_pl.episode import Message
    from mrlm_pl.policy import Policy

    torch.set_num_threads(os.cpu_count() or 1)

    class Words(Environment):
        name = "words"
        agents = ("first", "second")
        forks = True

        def tasks(self, split: str) -> DatasetTasks:
            vocabulary = int(SIZES[size]["vocab"])
            return DatasetTasks(self.name, split, [{"prompt": prompt(n, vocabulary)} for n in range(TASKS)])

        def reset(self, task: Any) -> Any:
            self.left = turns
            return {agent: [Message("user", str(task.data["prompt"]))] for agent in self.agents}

        def step(self, actions: Any) -> Step:
            self.left -= 1
            rewards = dict.fromkeys(self.agents, joint_reward([message.content for message in actions.values()]))
            if not self.left:
                return Step(rewards=rewards, done=True, stop_reason="end")
            return Step({agent: [Message("user", FURTHER)] for agent in self.agents}, rewards)

    times: list[float] = []

    class Clock(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            times.append(time.perf_counter())

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[Clock()],
    )
    groups = tasks_in_step(algorithm, turns)
    data = RolloutDataModule(
        Words(),
        groups=groups,
        group_size=GROUP if groups == 1 else 1,
        iterations=steps,
        sampling=Sampling(max_tokens=NEW_TOKENS),
    )

    def model() -> Policy:
        return Policy(folder, learning_rate=1e-5, chat_template=TEMPLATE, max_forward_tokens=FORWARD_TOKENS)

    policies = {name: model() for name in Words.agents}
    if algorithm == "magrpo":
        module: Any = MAGRPO(policies)
    elif algorithm == "ippo":
        module = IPPO(policies, critics={name: model() for name in Words.agents})
    else:
        module = MAPPO(policies, critic=model())
    trainer.fit(module, data)
    return report(times)


def run_peer(folder: str, size: str, turns: int, steps: int, algorithm: str) -> dict[str, Any]:
    """Step times and memory of CoMLRL."""
    import torch
    from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer
    from datasets import Dataset
    from transformers import AutoTokenizer

    torch.set_num_threads(os.cpu_count() or 1)
    times: list[float] = []
    config_class, trainer_class, per_task = {
        "magrpo": (MAGRPOConfig, MAGRPOTrainer, "_train_step_returns"),
        "ippo": (IACConfig, IACTrainer, "_run_batch"),
        "mappo": (MAACConfig, MAACTrainer, "_run_batch"),
    }[algorithm]
    original = getattr(trainer_class, per_task)

    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        times.append(time.perf_counter())
        return result

    setattr(trainer_class, per_task, timed)

    def further(prompt_history_per_agent: Any, response_history_per_agent: Any, **_: Any) -> list[str]:
        return [
            f"{prompts[-1]} {responses[-1]} {FURTHER}"
            for prompts, responses in zip(prompt_history_per_agent, response_history_per_agent, strict=True)
        ]

    tasks, vocabulary = tasks_in_step(algorithm, turns), int(SIZES[size]["vocab"])
    settings: dict[str, Any] = {
        "num_train_epochs": 1,
        "agent_learning_rate": 1e-5,
        "num_agents": 2,
        "num_generations": GROUP if tasks == 1 else 1,
        "max_new_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "num_turns": turns,
        "early_termination_threshold": None,
        "eval_interval": 0,
        "advantage_normalization": algorithm != "magrpo",
    }
    more: dict[str, Any] = {}
    if algorithm == "magrpo":
        settings |= {"joint_mode": "aligned", "rollout_buffer_size": sum(GROUP**turn for turn in range(turns))}
        more["num_agents"] = 2
    else:
        settings |= {"critic_learning_rate": 1e-5, "rollout_buffer_size": GROUP * turns}
        more["critics"] = [folder] * (2 if algorithm == "ippo" else 1)
    trainer = trainer_class(
        agents=[folder, folder],
        tokenizer=[AutoTokenizer.from_pretrained(folder) for _ in range(2)],
        model_config={"torch_dtype": "float32"},
        train_dataset=Dataset.from_list([{"prompt": prompt(n, vocabulary)} for n in range(steps * tasks)]),
        reward_func=lambda *texts, **_: [joint_reward(list(joint)) for joint in zip(*texts, strict=True)],
        external_transition=further if turns > 1 else None,
        args=config_class(**settings),
        **more,
    )
    trainer.verbose = False
    trainer.train()
    return report(times[tasks - 1 :: tasks])


def child(python: str, side: str, folder: str, turns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own."""
    command = [python, __file__, "--side", side, "--folder", folder, "--size", options.size]
    command += ["--steps", str(options.steps), "--turns", str(turns), "--algorithm", options.algorithm]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=offline)
    if result.returncode:
        raise SystemExit(f"{side} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def compare(folder: str, turns: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios at one number of turns."""
    pairs = []
    for _ in range(options.rounds):
        ours = child(sys.executable, "ours", folder, turns, options)
        pairs.append((ours, child(options.peer_python, "comlrl", folder, turns, options)))
    ratios = [statistics.median(ours["steps"]) / statistics.median(peer["steps"]) for ours, peer in pairs]
    ours_mib, peer_mib = (statistics.median(pair[side]["peak_mib"] for pair in pairs) for side in (0, 1))
    return {
        "algorithm": options.algorithm,
        "size": options.size,
        "turns": turns,
        "ours_step_s": round(statistics.median(step for ours, _ in pairs for step in ours["steps"]), 3),
        "comlrl_step_s": round(statistics.median(step for _, peer in pairs for step in peer["steps"]), 3),
        "step_ratio": round(statistics.median(ratios), 3),
        "step_ratios": [round(ratio, 3) for ratio in ratios],
        "ours_mib": round(ours_mib),
        "comlrl_mib": round(peer_mib),
    }


def main() -> None:
    """Run both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="a Python with CoMLRL installed")
    parser.add_argument("--algorithm", choices=["magrpo", "ippo", "mappo"], default="magrpo")
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["ours", "comlrl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run = run_ours if options.side == "ours" else run_peer
        print(json.dumps(run(options.folder, options.size, options.turns[0], options.steps, options.algorithm)))
        return
    if options.algorithm == "mappo" and options.turns != [1]:
        parser.error("mappo is compared with --turns 1: this vocabulary has no end of turn, which its critic reads")
    if not options.peer_python:
        parser.error("--peer-python is needed: `make peers` installs CoMLRL in .venv-peers-multi")
    folder = tempfile.mkdtemp()
    make_model(Path(folder), options.size)
    alone = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    rows = []
    for turns in options.turns:
        rows.append(compare(folder, turns, options) | {"imports_mib": round(int(alone.stdout) / 1024)})
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
