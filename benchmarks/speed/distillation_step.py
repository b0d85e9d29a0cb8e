"""Compare a step of full-vocabulary on-policy distillation with TRL's DistillationTrainer on the same work, in one run.

    python benchmarks/speed/distillation_step.py --peer-python .venv-peers/bin/python [--size xs32k] [--json out.json]

Both sides distill one random Llama into another with 32,000 words, in fp32 with AdamW: 4 prompts of 64 tokens, 8
samples each, exactly 64 new tokens, and the reverse KL divergence over the whole vocabulary (``beta`` 1). Each side
runs in its own process, in turns, on ``--threads`` threads; the first steps of a process are warm-up and not
counted. Printed are the medians and the ratios; times are wall seconds of whole steps (generation, teacher, loss,
backward, optimizer), and ``cpu`` their CPU seconds, which other processes of the machine hardly change.
``base_mib`` is a process's memory before its first step; ``memory_ratio`` compares the peaks above it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo_step import GROUP, NEW_TOKENS, PROMPTS, Clock, compared, in_turns
from memory import resident_mib
from provenance import provenance
from random_models import SIZES, TEMPLATE, make_model, prompt


def run_ours(folder: Path, size: str, steps: int) -> dict[str, Any]:
    """Return step times, memory and the first step's divergence of this project."""
    import lightning
    from quiet_trainer import quiet_trainer

    from mrlm_pl.algorithms import OnPolicyDistillation
    from mrlm_pl.data import RolloutDataModule
    from mrlm_pl.engines import Sampling
    from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
    from mrlm_pl.learner.policies.distillation import Distillation, Teacher
    from mrlm_pl.policy import Policy

    class Words(SingleAgentEnvironment):
        name = "words"

        def tasks(self, split: str) -> DatasetTasks:
            vocabulary = int(SIZES[size]["vocab"])
            return DatasetTasks(self.name, split, [{"prompt": prompt(n, vocabulary)} for n in range(64)])

        def begin(self, task: Any) -> str:
            return str(task.data["prompt"])

        def reply(self, message: Any) -> Outcome:
            return Outcome({"none": 0.0})

    clock = Clock()
    divergences: list[float] = []

    class Ticks(lightning.Callback):
        def on_train_start(self, *args: Any) -> None:
            base.append(resident_mib("VmHWM"))

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            clock.tick()
            divergences.append(module.metrics.update["train/student/teacher_divergence"])

    base: list[float] = []
    trainer = quiet_trainer(
        max_steps=steps, gradient_clip_val=1.0, default_root_dir=tempfile.mkdtemp(), callbacks=[Ticks()]
    )
    data = RolloutDataModule(
        Words(), groups=PROMPTS, group_size=GROUP, iterations=steps, sampling=Sampling(max_tokens=NEW_TOKENS)
    )
    policies = {
        "student": Policy(str(folder / "student"), learning_rate=1e-5, chat_template=TEMPLATE),
        "teacher": Policy(str(folder / "teacher"), trained=False, chat_template=TEMPLATE),
    }
    distillation = Distillation([Teacher("teacher")], form="full", beta=1.0)
    trainer.fit(OnPolicyDistillation(policies, {"agent": "student"}, distillation=distillation), data)
    return clock.report() | {"base_mib": base[0], "divergence": divergences[0]}


def run_peer(folder: Path, size: str, steps: int) -> dict[str, Any]:
    """Return step times, memory and the first step's loss of TRL with its default generation."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DistillationConfig, DistillationTrainer

    clock = Clock()
    base: list[float] = []

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            base.append(resident_mib("VmHWM"))

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.tick()

    vocabulary = int(SIZES[size]["vocab"])
    config = DistillationConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS * GROUP,
        max_completion_length=NEW_TOKENS,
        max_steps=steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        beta=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
    )
    rows = [{"prompt": prompt(n, vocabulary)} for n in range(64) for _ in range(GROUP)]
    trainer = DistillationTrainer(
        model=str(folder / "student"),
        teacher_model=str(folder / "teacher"),
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Ticks()],
    )
    trainer.train()
    logs = trainer.state.log_history
    lengths = [log["completions/mean_length"] for log in logs if "completions/mean_length" in log]
    first = next(log["loss"] for log in logs if "loss" in log)
    return clock.report() | {"base_mib": base[0], "divergence": first, "mean_length": statistics.mean(lengths)}


def main() -> None:
    """Run both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", required="--side" not in sys.argv, help="a Python with TRL: .venv-peers/bin/python"
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="xs32k")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        run = run_ours if options.side == "ours" else run_peer
        print(json.dumps(run(options.folder, options.size, options.steps)))
        return
    folder = tempfile.mkdtemp()
    for number, name in enumerate(("student", "teacher")):
        make_model(Path(folder) / name, options.size, seed=number)
    sides = {"ours": sys.executable, "trl": options.peer_python}
    results = in_turns(sides, folder, options.rounds, options.threads)
    summary = provenance("trl", options.peer_python) | {"size": options.size, "threads": options.threads}
    summary |= compared(results["ours"], results["trl"], "trl")
    for side, runs in results.items():
        summary[side] |= {name: statistics.median(run[name] for run in runs) for name in ("base_mib", "divergence")}
    above = {side: summary[side]["peak_mib"] - summary[side]["base_mib"] for side in sides}
    summary |= {"memory_ratio": above["ours"] / above["trl"]}
    text = json.dumps(summary, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
