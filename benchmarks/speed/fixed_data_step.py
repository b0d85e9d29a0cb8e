"""Compare DPO and SFT with TRL's trainers on the same work, in one run: losses, step time and peak memory.

    python benchmarks/speed/fixed_data_step.py --peer-python .venv-peers/bin/python --algorithm dpo --size s
        [--rounds 3]

Both sides train the same random Llama from the same folder in fp32 with AdamW and a constant learning rate: DPO on 8
pairs of 128 tokens, SFT on 8 rows of 256 tokens, half of each prompt. Every batch has all examples, so that the
losses of both sides can be compared step by step (the second shows the first gradient). TRL's DPO precomputes its
reference log-probabilities, too. Each side runs in its own process, in turns; the first two steps are warm-up and not
timed. Exit status 1 if a loss differs by more than 1e-5, relatively.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from grpo_step import in_turns
from memory import resident_mib
from random_models import SIZES, make_model, prompt

EXAMPLES, LEARNING_RATE, WARMUP, TOLERANCE = 8, 1e-4, 2, 1e-5
TOKENS = {"dpo": 128, "sft": 256}


def examples(algorithm: str, size: str) -> list[dict[str, str]]:
    """Return the rows of the data set; the last token of an answer is the end token."""
    words, half = int(SIZES[size]["vocab"]) - 1, TOKENS[algorithm] // 2
    rows = []
    for n in range(EXAMPLES):
        row = {"prompt": prompt(n, words, half)}
        names = ("completion",) if algorithm == "sft" else ("chosen", "rejected")
        for number, name in enumerate(names, start=1):
            row[name] = " " + prompt(1000 * number + n, words, half - 1)
        rows.append(row)
    return rows


def run_ours(algorithm: str, folder: str, size: str, steps: int) -> dict[str, Any]:
    """Return losses, step times and memory of this project."""
    import lightning
    import torch
    from quiet_trainer import quiet_trainer

    from mrlm_pl.algorithms import DPO, SFT
    from mrlm_pl.data import PreferenceDataModule, TrajectoryDataModule
    from mrlm_pl.policy import Policy

    torch.set_num_threads(os.cpu_count() or 1)
    source = Path(tempfile.mkdtemp()) / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in examples(algorithm, size)))
    times: list[float] = []
    losses: list[float] = []

    class Clock(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            times.append(time.perf_counter())
            losses.append(float(trainer.callback_metrics["train/loss"]))

    trainer = quiet_trainer(max_epochs=steps, default_root_dir=tempfile.mkdtemp(), callbacks=[Clock()])
    policies = {"main": Policy(folder, learning_rate=LEARNING_RATE)}
    if algorithm == "dpo":
        trainer.fit(DPO(policies), PreferenceDataModule(str(source), batch_size=EXAMPLES))
    else:
        trainer.fit(SFT(policies), TrajectoryDataModule(str(source), batch_size=EXAMPLES))
    return report(times, losses)


def run_peer(algorithm: str, folder: str, size: str, steps: int) -> dict[str, Any]:
    """Return losses, step times and memory of TRL."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            times.append(time.perf_counter())

    common = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": EXAMPLES,
        "max_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_length": None,
        "model_init_kwargs": {"dtype": "float32"},
    }
    data = Dataset.from_list(examples(algorithm, size))
    if algorithm == "dpo":
        config = DPOConfig(**common, beta=0.1, precompute_ref_log_probs=True)
        trainer = DPOTrainer(model=folder, args=config, train_dataset=data, callbacks=[Clock()])
    else:
        trainer = SFTTrainer(model=folder, args=SFTConfig(**common), train_dataset=data, callbacks=[Clock()])
    trainer.train()
    return report(times, [log["loss"] for log in trainer.state.log_history if "loss" in log])


def report(times: list[float], losses: list[float]) -> dict[str, Any]:
    """Return losses, seconds of each step after the warm-up, and the process's peak memory in MiB."""
    steps = [after - before for before, after in itertools.pairwise(times)][WARMUP - 1 :]
    return {"losses": losses, "steps": steps, "peak_mib": resident_mib("VmHWM")}


def main() -> None:
    """Run both sides in turns and print medians, ratios and the largest difference of the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", help="a Python with TRL; default: time this project only")
    parser.add_argument("--algorithm", choices=sorted(TOKENS), default="dpo")
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run = run_ours if options.side == "ours" else run_peer
        print(json.dumps(run(options.algorithm, options.folder, options.size, options.steps)))
        return
    folder = tempfile.mkdtemp()
    make_model(Path(folder), options.size, knows_eos=True, vocab=int(SIZES[options.size]["vocab"]) - 1)
    sides = {"ours": sys.executable} | ({"trl": options.peer_python} if options.peer_python else {})
    results = in_turns(sides, folder, options.rounds, os.cpu_count() or 1)
    summary: dict[str, Any] = {"algorithm": options.algorithm, "size": options.size}
    for side, runs in results.items():
        summary[side] = {
            "step_s": statistics.median(step for run in runs for step in run["steps"]),
            "peak_mib": statistics.median(run["peak_mib"] for run in runs),
            "losses": runs[0]["losses"][:4],
        }
    if options.peer_python:
        ratios = [
            statistics.median(ours["steps"]) / statistics.median(peer["steps"])
            for ours, peer in zip(results["ours"], results["trl"], strict=True)
        ]
        pairs = zip(results["ours"][0]["losses"], results["trl"][0]["losses"], strict=True)
        summary["step_ratio"], summary["step_ratios"] = statistics.median(ratios), ratios
        summary["memory_ratio"] = summary["ours"]["peak_mib"] / summary["trl"]["peak_mib"]
        summary["loss_difference"] = max(abs(ours - peer) / abs(peer) for ours, peer in pairs)
    printed = json.dumps(summary, indent=2)
    print(printed)
    if options.json:
        options.json.write_text(printed + "\n")
    if summary.get("loss_difference", 0.0) > TOLERANCE:
        raise SystemExit(f"the losses differ by {summary['loss_difference']:.2g}")


if __name__ == "__main__":
    main()
