"""Compare step time and peak memory of team training with CoMLRL's trainers on the same work, in one run.

    python benchmarks/speed/team_step.py --peer-python .venv-peers-multi/bin/python [--algorithm magrpo] [--turns 1 2 3]

Two agents with a random Llama model each, from the same folder, in fp32 with AdamW: one task of 64 tokens, 4 decisions
(``--group``) of each agent in each state, of 32 tokens (``--new-tokens``; no token ends a turn), aligned joint actions,
hence 1, 5 or 21 states at 1, 2 or 3 turns; the next turn's prompt is the conversation and one more word. A step is one
task: its whole tree, rewards, gradients and optimizer steps, one per agent here and one per agent and turn in CoMLRL.
``ippo`` (their IAC, a critic per agent) and ``mappo`` (their MAAC, one critic, whose vocabulary has the end of a turn,
as ours reads it between turns) have no trees: a step is one task with 4 decisions of each agent at 1 turn, and 4 tasks
with one decision each at more turns. With ``--compile`` ours is measured with compiled layers too, of the engine and of
the policies; CoMLRL has no such option. A tree's update is divided into micro-batches of ``--states`` states: more of
them take less time and more memory. Each side runs in its own process, in turns; the first two steps are warm-up.
Printed are medians and ratios of wall seconds and of processor seconds, which other processes of the machine hardly
change, and the peak memory of the processes and of one that only imports torch, transformers and Lightning. ``--json``
keeps the rows of other sizes and turns that its file has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_step import Clock, compared, in_turns
from random_models import SIZES, TEMPLATE, make_model, prompt, reward, vocabulary_of

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

TASKS = 64
FURTHER = "w1"
AGENTS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
TREES = ("magrpo", "marloo")
"""Algorithms whose turns branch."""
FORWARD_TOKENS = 540
"""Maximal tokens of a forward pass without trees; CoMLRL makes a pass per sequence."""
IMPORTS = "import lightning, torch, transformers, memory; print(memory.resident_mib('VmHWM'))"


@dataclass(frozen=True)
class Work:
    """The work of both sides: algorithm, steps, agents, and number and length of decisions."""

    turns: int
    steps: int
    algorithm: str
    group: int
    new_tokens: int
    critic: str
    learning_rate: float
    seed: int
    agents: int = 2
    batch_states: int = 3
    """States in a micro-batch of a tree, of about 150 tokens of each agent."""

    @property
    def tasks_in_step(self) -> int:
        """Return the number of tasks in a step."""
        return 1 if self.algorithm in TREES or self.turns == 1 else self.group

    @property
    def micro_batches(self) -> int:
        """Return the number of micro-batches of our update."""
        return math.ceil(self.states / self.batch_states) if self.algorithm in TREES else 1

    @property
    def states(self) -> int:
        """Return the number of states of a tree."""
        return sum(self.group**turn for turn in range(self.turns))


def joint_reward(texts: list[str]) -> float:
    """Return the fraction of words with an even number in the texts of all agents."""
    return reward(" ".join(texts))


def words(folder: str, work: Work, meter: Clock) -> Any:
    """Return an environment in which the agents of a work write words to the tasks of a folder's vocabulary."""
    from mrlm_pl.environment import DatasetTasks, Environment, Step
    from mrlm_pl.episode import Message

    class Words(Environment):
        name = "words"
        agents = AGENTS[: work.agents]
        forks = True

        def tasks(self, split: str) -> DatasetTasks:
            vocabulary = vocabulary_of(folder)
            return DatasetTasks(self.name, split, [{"prompt": prompt(n, vocabulary)} for n in range(TASKS)])

        def reset(self, task: Any) -> Any:
            self.left = work.turns
            return {agent: [Message("user", str(task.data["prompt"]))] for agent in self.agents}

        def step(self, actions: Any) -> Step:
            self.left -= 1
            joint = joint_reward([message.content for message in actions.values()])
            rewards = dict.fromkeys(self.agents, meter.rewarded(joint))
            if not self.left:
                return Step(rewards=rewards, done=True, stop_reason="end")
            return Step({agent: [Message("user", FURTHER)] for agent in self.agents}, rewards)

    return Words()


def run_ours(
    folder: str,
    work: Work,
    clock: Clock | None = None,
    callbacks: Sequence[Any] = (),
    *,
    compiled: bool = False,
    rank: int | None = None,
    device: str = "cpu",
    precision: str = "32-true",
) -> dict[str, Any]:
    """Return step times and memory of this project; extra callbacks, and another clock, may measure more.

    Args:
        compiled: whether the layers of the policies and of the engine's decode step are compiled.
        rank: rank of the agents' adapters on one model; None: each agent trains its own model.
        device: ``cpu`` or ``cuda``.
        precision: precision of the trainer.
    """
    import lightning
    from quiet_trainer import quiet_trainer

    from mrlm_pl.algorithms import IPPO, MAGRPO, MAPPO, MARLOO
    from mrlm_pl.data import RolloutDataModule
    from mrlm_pl.engines import InProcessEngine, Sampling
    from mrlm_pl.policy import LoRA, Policy

    meter = clock or Clock()

    class Ticks(lightning.Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            meter.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                meter.tick()

    lightning.seed_everything(work.seed, verbose=False)
    trainer = quiet_trainer(
        accelerator=device,
        devices=1,
        precision=precision,
        max_steps=work.steps,
        accumulate_grad_batches=work.micro_batches,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[Ticks(), *callbacks],
    )
    groups = work.tasks_in_step
    data = RolloutDataModule(
        words(folder, work, meter),
        groups=groups,
        group_size=work.group if groups == 1 else 1,
        iterations=work.steps,
        sampling=Sampling(max_tokens=work.new_tokens),
        engine=InProcessEngine(compile=True) if compiled else None,
        seed=work.seed,
    )

    def model(source: str = folder) -> Policy:
        settings: dict[str, Any] = {"chat_template": TEMPLATE, "weight_decay": 0.01, "compile": compiled}
        if rank is not None:
            settings["lora"] = LoRA(rank)
        if work.algorithm not in TREES:
            settings["max_forward_tokens"] = FORWARD_TOKENS
        return Policy(source, learning_rate=work.learning_rate, **settings)

    policies = {name: model() for name in AGENTS[: work.agents]}
    if work.algorithm in TREES:
        module: Any = {"magrpo": MAGRPO, "marloo": MARLOO}[work.algorithm](policies)
    elif work.algorithm == "ippo":
        module = IPPO(policies, agent_critics={name: model() for name in AGENTS[: work.agents]})
    else:
        module = MAPPO(policies, critic=model(work.critic))
    trainer.fit(module, data)
    return meter.report()


def run_peer(folder: str, work: Work, clock: Clock | None = None) -> dict[str, Any]:
    """Return step times and memory of CoMLRL; another clock may measure more."""
    from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
    from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer, MARLOOConfig, MARLOOTrainer
    from datasets import Dataset
    from transformers import AutoTokenizer, set_seed

    clock = clock or Clock()
    config_class, trainer_class, per_task = {
        "magrpo": (MAGRPOConfig, MAGRPOTrainer, "_train_step_returns"),
        "marloo": (MARLOOConfig, MARLOOTrainer, "_train_step_returns"),
        "ippo": (IACConfig, IACTrainer, "_run_batch"),
        "mappo": (MAACConfig, MAACTrainer, "_run_batch"),
    }[work.algorithm]
    original = getattr(trainer_class, per_task)

    def timed(self: Any, *arguments: Any, **options: Any) -> Any:
        if not clock.wall:
            clock.begin()
        result = original(self, *arguments, **options)
        clock.tick()
        return result

    setattr(trainer_class, per_task, timed)

    def further(prompt_history_per_agent: Any, response_history_per_agent: Any, **_: Any) -> list[str]:
        return [
            f"{prompts[-1]} {responses[-1]} {FURTHER}"
            for prompts, responses in zip(prompt_history_per_agent, response_history_per_agent, strict=True)
        ]

    def rewards(*texts: Any, **_: Any) -> list[float]:
        return [clock.rewarded(joint_reward(list(joint))) for joint in zip(*texts, strict=True)]

    tasks, vocabulary = work.tasks_in_step, vocabulary_of(folder)
    settings: dict[str, Any] = {
        "num_train_epochs": 1,
        "agent_learning_rate": work.learning_rate,
        "num_agents": work.agents,
        "num_generations": work.group if tasks == 1 else 1,
        "max_new_tokens": work.new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "num_turns": work.turns,
        "early_termination_threshold": None,
        "eval_interval": 0,
        "advantage_normalization": work.algorithm not in TREES,
    }
    more: dict[str, Any] = {}
    if work.algorithm in TREES:
        settings |= {"joint_mode": "aligned", "rollout_buffer_size": work.states}
        more["num_agents"] = work.agents
    else:
        settings |= {"critic_learning_rate": work.learning_rate, "rollout_buffer_size": work.group * work.turns}
        more["critics"] = [folder] * work.agents if work.algorithm == "ippo" else [work.critic]
    set_seed(work.seed)
    trainer = trainer_class(
        agents=[folder] * work.agents,
        tokenizer=[AutoTokenizer.from_pretrained(folder) for _ in range(work.agents)],
        model_config={"torch_dtype": "float32"},
        train_dataset=Dataset.from_list([{"prompt": prompt(n, vocabulary)} for n in range(work.steps * tasks)]),
        reward_func=rewards,
        external_transition=further if work.turns > 1 else None,
        args=config_class(**settings),
        **more,
    )
    trainer.verbose = False
    trainer.train()
    return clock.report(tasks)


def compare(folder: str, turns: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return medians and ratios at one number of turns, a row for each way of ours."""
    kinds = [False, True] if options.compile else [False]
    states = options.states if options.algorithm in TREES and turns > 1 else options.states[:1]
    ways = {way: f"{'compiled' if way[0] else 'ours'}-{way[1]}" for way in itertools.product(kinds, states)}
    sides = {**dict.fromkeys(ways.values(), sys.executable), "comlrl": options.peer_python}
    more = ("--turns", str(turns), "--critic", options.critic)
    reports = in_turns(sides, folder, options.rounds, options.threads, *more, WANDB_MODE="disabled")
    return [
        {"size": options.size, "turns": turns, "compiled": compiled, "batch_states": count, "rounds": options.rounds}
        | compared(reports[side], reports["comlrl"], "comlrl")
        for (compiled, count), side in ways.items()
    ]


def main() -> None:
    """Run both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", required="--side" not in sys.argv, help="a Python with CoMLRL: .venv-peers-multi/bin/python"
    )
    parser.add_argument("--algorithm", choices=["magrpo", "marloo", "ippo", "mappo"], default="magrpo")
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--group", type=int, default=4, help="decisions of each agent in each state")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens per decision")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="measure ours with compiled layers too")
    parser.add_argument("--states", type=int, nargs="+", default=[3], help="in a micro-batch of our update of a tree")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--critic", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        kind, _, states = options.side.partition("-")
        run = run_peer if kind == "comlrl" else partial(run_ours, compiled=kind == "compiled")
        (turns,) = options.turns
        settings = (options.group, options.new_tokens, options.critic, options.learning_rate, options.seed)
        work = Work(turns, options.steps, options.algorithm, *settings, batch_states=int(states or 1))
        print(json.dumps(run(options.folder, work)))
        return
    folder, options.critic = tempfile.mkdtemp(), tempfile.mkdtemp()
    make_model(Path(folder), options.size)
    make_model(Path(options.critic), options.size, knows_eos=True)
    alone = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    names = ("algorithm", "group", "new_tokens", "threads")
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else None
    found = provenance("comlrl", options.peer_python, kept=before) | {name: getattr(options, name) for name in names}
    found["imports_mib"] = round(float(alone.stdout))
    measured = {(options.size, turns) for turns in options.turns}
    kept = before["rows"] if before else []
    found["rows"] = [row for row in kept if (row["size"], row["turns"]) not in measured]
    for turns in options.turns:
        rows = compare(folder, turns, options)
        found["rows"] += rows
        print(*map(json.dumps, rows), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
