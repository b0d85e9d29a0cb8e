"""Compare step time and peak memory of GRPO with TRL's GRPOTrainer on the same work, in one run.

    python benchmarks/speed/grpo_step.py --peer-python .venv-peers/bin/python --size s [--rounds 3] [--json out.json]

Both sides train the same random Llama model from the same folder, by default in fp32, with AdamW: 4 prompts of 64
tokens, 8 samples each, exactly 64 new tokens (no token of the vocabulary ends a turn, so forcing the length costs
neither side time). Each side runs in its own process, in turns, on ``--threads`` threads; the first steps of a process
are warm-up and not counted. Printed are the medians and the ratios; times are wall seconds of whole steps (generation,
reward, loss, backward, optimizer), and ``cpu`` the seconds of the processors in them, which other processes of the
machine hardly change. ``--json`` keeps the rows of other sizes and precisions that its file has.

On a GPU, Llama models with the shapes of Qwen2.5, and more and longer samples:

    python benchmarks/speed/grpo_step.py --device cuda --peer-python PYTHON --size 0.5b --prompts 16 \\
        --prompt-tokens 256 --new-tokens 512 --micro-batches 4 --peer-micro-batches 4 --precision bf16-mixed \\
        --peer-bf16 --peer-dtype bfloat16 --json benchmarks/results/gpu_grpo_step.json

There the memory is that of the device's tensors, and ``mfu`` the share of its peak that a step's training takes: six
operations per parameter and token, those of a prompt counted for every sample, generation not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory import resident_mib
from provenance import provenance
from random_models import SIZES, TEMPLATE, make_model, parameters_of, prompt, reward, vocabulary_of

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64
WARMUP = 2
UNITS = ("steps", "cpu")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Operations per second in bf16 of the device whose name holds the key, from its data sheet."""


@dataclass(frozen=True)
class Shape:
    """The prompts of a step, the samples of each, and their tokens."""

    prompts: int = PROMPTS
    group: int = GROUP
    prompt_tokens: int = PROMPT_TOKENS
    new_tokens: int = NEW_TOKENS


class Clock:
    """Wall and processor seconds at the ends of steps, and the rewards of all episodes in order.

    Args:
        warmup: steps that are not counted.
    """

    def __init__(self, warmup: int = WARMUP) -> None:
        self.warmup = warmup
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.rewards: list[float] = []

    def rewarded(self, value: float) -> float:
        """Note a reward and return it."""
        self.rewards.append(value)
        return value

    def begin(self) -> None:
        """Note the beginning of the first step."""
        self.tick()

    def tick(self) -> None:
        """Note the end of a step."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def report(self, ticks: int = 1) -> dict[str, Any]:
        """Return the seconds of each step after the warm-up, all rewards, and the process's peak memory in MiB.

        Args:
            ticks: number of ticks in a step.
        """
        both = {"steps": self.wall, "cpu": self.cpu}
        return {
            **{unit: _between(ends[::ticks])[self.warmup :] for unit, ends in both.items()},
            "rewards": self.rewards,
            "peak_mib": _peak_mib(),
        }


def _peak_mib() -> float:
    """Return the largest memory of the tensors on the GPU, or of the process where there is none."""
    import torch

    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    return resident_mib("VmHWM")


def _between(ends: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(ends)]


def run_ours(
    folder: str,
    steps: int,
    precision: str,
    learning_rate: float = 1e-5,
    seed: int = 0,
    callbacks: Sequence[Any] = (),
    shape: Shape = Shape(),
    clock: Clock | None = None,
    *,
    compiled: bool = False,
    micro_batches: int = 1,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return step times and memory of this project; extra callbacks, and another clock, may measure more.

    Args:
        compiled: whether the layers of the learner are compiled, and on a CPU those of the engine's decode step.
        micro_batches: number of micro-batches of an update.
        device: ``cpu`` or ``cuda``.
    """
    import lightning
    import torch
    from quiet_trainer import quiet_trainer

    from mrlm_pl.algorithms import GRPO
    from mrlm_pl.data import RolloutDataModule
    from mrlm_pl.engines import InProcessEngine, Sampling
    from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
    from mrlm_pl.policy import Policy

    class Words(SingleAgentEnvironment):
        name = "words"

        def tasks(self, split: str) -> DatasetTasks:
            vocabulary = vocabulary_of(folder)
            rows = [{"prompt": prompt(n, vocabulary, shape.prompt_tokens)} for n in range(64)]
            return DatasetTasks(self.name, split, rows)

        def begin(self, task: Any) -> str:
            return str(task.data["prompt"])

        def reply(self, message: Any) -> Outcome:
            return Outcome({"even": meter.rewarded(reward(message.content))})

    meter = clock or Clock()

    class Ticks(lightning.Callback):
        def on_train_epoch_start(self, *args: Any) -> None:
            meter.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % micro_batches == 0:
                meter.tick()

    lightning.seed_everything(seed, verbose=False)
    trainer = quiet_trainer(
        accelerator=device,
        devices=1,
        max_steps=steps,
        accumulate_grad_batches=micro_batches,
        precision=precision,
        gradient_clip_val=1.0,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[Ticks(), *callbacks],
    )
    engine = None
    if compiled and device == "cpu":
        engine = InProcessEngine(dtype=torch.bfloat16 if precision == "bf16-mixed" else None, compile=True)
    data = RolloutDataModule(
        Words(),
        groups=shape.prompts,
        group_size=shape.group,
        iterations=steps,
        sampling=Sampling(max_tokens=shape.new_tokens),
        engine=engine,
        seed=seed,
    )
    policy = Policy(folder, learning_rate=learning_rate, chat_template=TEMPLATE, compile=compiled)
    trainer.fit(GRPO({"main": policy}), data)
    return meter.report()


def run_peer(
    folder: str,
    steps: int,
    learning_rate: float = 1e-5,
    seed: int = 0,
    shape: Shape = Shape(),
    clock: Clock | None = None,
    *,
    bf16: bool = False,
    compiled: bool = False,
    micro_batches: int = 1,
    dtype: str = "float32",
    continuous: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return step times and memory of TRL with its default generation; another clock may measure more.

    Args:
        bf16: whether its trainer computes in bf16 by autocast.
        compiled: whether its trainer compiles the model.
        micro_batches: number of micro-batches of an update.
        dtype: dtype of the weights.
        continuous: whether it generates by the continuous batching of transformers.
        device: ``cpu`` or ``cuda``.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    meter = clock or Clock()

    class Ticks(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            meter.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            meter.tick()

    vocabulary = vocabulary_of(folder)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=shape.prompts * shape.group // micro_batches,
        gradient_accumulation_steps=micro_batches,
        num_generations=shape.group,
        max_completion_length=shape.new_tokens,
        max_steps=steps,
        learning_rate=learning_rate,
        seed=seed,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=device == "cpu",
        bf16=bf16,
        torch_compile=compiled,
        use_transformers_continuous_batching=continuous,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        model_init_kwargs={"dtype": dtype},
    )
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=lambda completions, **_: [meter.rewarded(reward(text)) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt(n, vocabulary, shape.prompt_tokens)} for n in range(64)]),
        callbacks=[Ticks()],
    )
    trainer.train()
    key = "completions/mean_length"
    return meter.report() | {
        "mean_length": statistics.mean(log[key] for log in trainer.state.log_history if key in log)
    }


def model_flops(parameters: int, shape: Shape) -> float:
    """Return the operations of a step's training by the usual estimate."""
    rows = shape.prompts * shape.group
    return 6.0 * parameters * rows * (shape.prompt_tokens + shape.new_tokens)


def peak_flops() -> float:
    """Return the peak of the GPU in bf16; NaN for one without an entry."""
    import torch

    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), math.nan)


def in_turns(
    pythons: Mapping[str, str], folder: str, rounds: int, threads: int, *more: str, **variables: str
) -> dict[str, list[dict[str, Any]]]:
    """Return each side's reports from processes with the present command and ``--side``; each is noted as it comes.

    Args:
        pythons: Python interpreter of each side.
        folder: folder of the model.
        rounds: number of processes of each side.
        threads: number of threads of a process.
        more: options of all processes.
        variables: environment variables of the processes.
    """
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in pythons}
    for _ in range(rounds):
        for side, python in pythons.items():
            command = [python, *sys.argv, *more, "--side", side, "--folder", folder]
            found[side].append(of_child(command, side, threads, None, **variables))
            print(f"{side}: steps of {found[side][-1]['steps']} s", file=sys.stderr, flush=True)
    return found


def of_child(
    command: list[str], side: str, threads: int, timeout: float | None = None, **variables: str
) -> dict[str, Any]:
    """Return the report of a side that runs in its own process with a number of threads.

    Raises:
        SystemExit: the process failed.
        subprocess.TimeoutExpired: it takes more seconds than ``timeout``.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), **variables}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=timeout)
    if result.returncode:
        raise SystemExit(f"{side} failed:\n{result.stderr[-3000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def compared(ours: list[dict[str, Any]], peer: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return medians of two sides that ran in turns, and their ratios.

    Args:
        ours: reports of this project's rounds.
        peer: reports of the peer's.
        name: the peer's name.
    """
    found: dict[str, Any] = {}
    for side, runs in {"ours": ours, name: peer}.items():
        found[side] = {f"{unit}_s": statistics.median(one for run in runs for one in run[unit]) for unit in UNITS}
        found[side]["peak_mib"] = statistics.median(run["peak_mib"] for run in runs)
    for unit in UNITS:
        pairs = zip(ours, peer, strict=True)
        ratios = [statistics.median(one[unit]) / statistics.median(other[unit]) for one, other in pairs]
        found |= {f"{unit}_ratio": statistics.median(ratios), f"{unit}_ratios": ratios}
    return found | {"peak_ratio": found["ours"]["peak_mib"] / found[name]["peak_mib"]}


def main() -> None:
    """Run both sides in turns and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer-python", required="--side" not in sys.argv, help="a Python with TRL: .venv-peers/bin/python"
    )
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="32-true", help="of ours; the peer computes in bf16 with --peer-bf16")
    parser.add_argument("--peer-bf16", action="store_true")
    parser.add_argument("--compile", action="store_true", help="compile the layers of our learner and engine")
    parser.add_argument("--peer-compile", action="store_true", help="let the peer's trainer compile its model")
    parser.add_argument("--micro-batches", type=int, default=1, help="of our update: more take less memory")
    parser.add_argument("--peer-micro-batches", type=int, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peer-dtype", default="float32", help="of the peer's weights")
    parser.add_argument("--peer-continuous", action="store_true", help="the peer generates by continuous batching")
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    parser.add_argument("--group", type=int, default=GROUP, help="samples of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = Shape(options.prompts, options.group, options.prompt_tokens, options.new_tokens)
    if options.side:
        import torch

        torch.set_num_threads(options.threads)
        run = (
            partial(
                run_ours,
                precision=options.precision,
                compiled=options.compile,
                micro_batches=options.micro_batches,
            )
            if options.side == "ours"
            else partial(
                run_peer,
                bf16=options.peer_bf16,
                compiled=options.peer_compile,
                micro_batches=options.peer_micro_batches,
                dtype=options.peer_dtype,
                continuous=options.peer_continuous,
            )
        )
        settings = {"learning_rate": options.learning_rate, "seed": options.seed}
        settings |= {"device": options.device, "shape": shape}
        print(json.dumps(run(options.folder, options.steps, **settings)))
        return
    folder = tempfile.mkdtemp()
    make_model(Path(folder), options.size, max_position_embeddings=max(512, shape.prompt_tokens + shape.new_tokens))
    sides = {"ours": sys.executable, "trl": options.peer_python}
    results = in_turns(sides, folder, options.rounds, options.threads)
    peer = "bf16-mixed" if options.peer_bf16 else "32-true"
    work = {"size": options.size, "precision": options.precision, "peer_precision": peer}
    work |= {"compiled": options.compile, "peer_compiled": options.peer_compile}
    work["micro_batches"] = options.micro_batches
    if options.device != "cpu":
        names = ("peer_micro_batches", "peer_dtype", "peer_continuous")
        work |= {**{name: getattr(options, name) for name in names}, **vars(shape)}
    row = {**work, "threads": options.threads, "rounds": options.rounds}
    row |= compared(results["ours"], results["trl"], "trl")
    if options.device != "cpu":
        for side in sides:
            row[side]["mfu"] = model_flops(parameters_of(folder), shape) / row[side]["steps_s"] / peak_flops()
    print(json.dumps(row, indent=2))
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else None
        rows = [other for other in (before["rows"] if before else []) if not work.items() <= other.items()]
        found = {**provenance("trl", options.peer_python, kept=before, device=options.device), "rows": [*rows, row]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
