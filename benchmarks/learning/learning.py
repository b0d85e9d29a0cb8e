"""Measure held-out accuracy before and after every algorithm of one policy, for several seeds, in one table.

    python -m benchmarks.learning.learning [--configs quickstart algorithms/ppo ...] [--seeds 0 1 2 3 4] [--json FILE]
    python -m benchmarks.learning.learning --curves [--configs ...] [--seeds ...] [--data FOLDER] [--json FILE]

Every configuration starts from builtin:tiny on the generated problems of difficulty 1 and is evaluated on the same 500
held-out problems before and after. SFT and the preference algorithms train on 6,000 episodes of the policy from `mrlm
collect`: SFT on the right ones, the others on 8 of each problem, KTO on each by its success. ``rewards`` are the mean
rewards of the rollouts, one per iteration; CPU seconds are those of all processes, collection and evaluations included.

``--curves`` measures training on fixed data and distillation at several optimizer steps instead: for policies the
accuracy on 500 problems of the validation split, which :class:`~mrlm_callbacks.HeldOutEvaluation` plays for its curve;
the table has those of the test split. For reward models it is the accuracy on held-out answers. A seed
collects its files once for all configurations; the reward models share the answers of seed 0, divided by the run's
seed. ``--data`` keeps the files.

Runs that ``--json`` holds already are not repeated; the file keeps the rows of the other form.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from mrlm_pl.cli.main import main as main_of_mrlm

WITHOUT_KL = "--model.kl.coefficient 0"
CONFIGS = (
    "quickstart",
    "algorithms/dapo",
    *(
        f"quickstart --model {name} {WITHOUT_KL}"
        for name in ("GSPO", "CISPO", "RLOO", "REINFORCE", "REINFORCEPlusPlusBaseline", "ReMax")
    ),
    "quickstart --model REINFORCEPlusPlus",
    "algorithms/ppo",
    "algorithms/sft",
    *(f"algorithms/preferences/{name}" for name in ("dpo", "simpo", "orpo", "kto")),
)
"""Configurations below ``configs/``, without ``.yaml``, each with its options."""

MATH = ["--environment", "math", "--environment.difficulty", "[1, 1]", "--max-tokens", "32"]
EPISODES = 6000


COLLECTED = {
    "right.jsonl": [*MATH, "--num-episodes", str(EPISODES), "--filter-reward", "1"],
    "groups.jsonl": [*MATH, "--num-episodes", str(EPISODES), "--samples-per-task", "8"],
    "joint.jsonl": [
        *("--environment", "coordination", "--max-tokens", "4"),
        *("--num-episodes", "1600", "--samples-per-task", "8"),
    ],
    "answers.jsonl.gz": [
        *(*MATH, "--environment.kinds", "[word]", "--num-episodes", "36000"),
        *("--samples-per-task", "2", "--temperatures", "0.3", "0.7", "1.0"),
    ],
}
"""Options of ``mrlm collect`` by the file that it writes, as in the comments of the configurations."""


@dataclass(frozen=True)
class Curve:
    """Measurements of a run at several optimizer steps.

    Args:
        measures: axis by the number that it shows: a metric of ``metrics.csv``, or ``accuracy`` on validation tasks.
        every: steps from one measurement to the next.
        files: option of the data module by file: one of :data:`COLLECTED`, or of ``mrlm balance``.
        options: further ones of ``mrlm fit``.
    """

    measures: Mapping[str, str]
    every: int
    files: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()


def on_math(train: str, every: int) -> Curve:
    """Return the measurements of a policy that learns from answers to math problems."""
    played = ["--trainer.callbacks.environment", "MathEnvironment"]
    played += ["--trainer.callbacks.environment.difficulty", "[1, 1]", "--trainer.callbacks.sampling.max_tokens", "32"]
    return Curve({"accuracy": "validation accuracy"}, every, {"train": train}, played)


COORDINATED = ["--trainer.callbacks.environment", "CoordinationGame", "--trainer.callbacks.sampling.max_tokens", "4"]
BALANCED = {"train": "balanced.jsonl", "validation": "balanced.validation.jsonl"}
PAIRS = {"train": "pairs.jsonl", "validation": "pairs.validation.jsonl"}

CURVES = {
    "algorithms/preferences/dpo": on_math("groups.jsonl", 7),
    "algorithms/preferences/simpo": on_math("groups.jsonl", 7),
    "algorithms/preferences/orpo": on_math("groups.jsonl", 7),
    "algorithms/preferences/kto": on_math("groups.jsonl", 27),
    "algorithms/preferences/madpo": Curve({"accuracy": "validation success"}, 9, {"train": "joint.jsonl"}, COORDINATED),
    "algorithms/distillation/teacher": Curve(
        {"train/student/teacher_divergence": "divergence, nats per token", "accuracy": "validation accuracy"},
        10,
        options=["--trainer.limit_val_batches", "0"],
    ),
    "algorithms/preferences/pairwise_reward_model": Curve(
        {"val/pair_accuracy": "held-out pair accuracy"}, 20, PAIRS, ["--trainer.max_steps", "140"]
    ),
    "algorithms/correctness_model": Curve(
        {"val/accuracy": "held-out accuracy", "val/auc": "held-out AUC"}, 40, BALANCED, ["--trainer.max_steps", "280"]
    ),
    "algorithms/sft": on_math("right.jsonl", 16),
}
"""Learning curves by configuration below ``configs/``."""


FORKED = (
    *("lightning.pytorch", "torch.utils.tensorboard", "transformers.models.llama.modeling_llama", "peft"),
    *("mrlm_environments", "mrlm_callbacks.held_out_evaluation", "mrlm_pl.data.rollout.module"),
    *("mrlm_pl.cli.commands.collect", "mrlm_pl.cli.commands.fit", "mrlm_pl.runs.trainer", "mrlm_pl.runs.seated_model"),
)
"""Modules that the commands share; most of a short run would be their import."""


def call(*arguments: str) -> None:
    """Run an ``mrlm`` command in a fork of this process."""
    for module in FORKED:
        importlib.import_module(module)
    with tempfile.TemporaryFile("w+") as output:
        process = multiprocessing.get_context("fork").Process(target=command, args=(arguments, output.fileno()))
        process.start()
        process.join()
        if process.exitcode:
            output.seek(0)
            raise SystemExit(f"mrlm {' '.join(arguments)} failed:\n{output.read()[-3000:]}")


def command(arguments: Sequence[str], output: int) -> None:
    """Run an ``mrlm`` command that writes to a file, and end the process with its status."""
    for stream in (1, 2):
        os.dup2(output, stream)
    raise SystemExit(main_of_mrlm(arguments))


def from_rollouts(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the accuracies before and after an online algorithm, whose callback evaluates, and its rewards."""
    options = ["--seed_everything", str(seed), "--trainer.default_root_dir", str(folder / "run"), *overrides]
    path, *own = config.split()
    call("fit", "--config", f"configs/{path}.yaml", *own, *options)
    with (folder / "run/metrics.csv").open() as file:
        rewards = [round(float(row["rollout/reward"]), 3) for row in csv.DictReader(file) if row["rollout/reward"]]
    files = {moment: folder / f"run/evaluation_{moment}.json" for moment in ("before", "after")}
    accuracies = {moment: json.loads(file.read_text())["math"]["accuracy"] for moment, file in files.items()}
    return accuracies | {"rewards": rewards}


def collected(name: str, seed: int, folder: Path) -> Path:
    """Return a file of training data in a folder, which is collected with a seed unless it is there."""
    path = folder / f"seed-{seed}" / name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if name in COLLECTED:
        call("collect", "--model", "builtin:tiny", *COLLECTED[name], "--seed", str(seed), "--output", str(path))
        return path
    answers = collected("answers.jsonl.gz", 0, folder)
    files = ["--output", str(path.with_name("balanced.jsonl")), "--pairs", str(path.with_name("pairs.jsonl"))]
    call("balance", str(answers), "--fill-wrong", "--seed", str(seed), *files)
    return path


def from_episodes(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the accuracies before and after training on the policy's own episodes."""
    episodes = collected("right.jsonl" if config == "algorithms/sft" else "groups.jsonl", seed, folder)
    options = ["--data.train", str(episodes), "--seed_everything", str(seed), *overrides]
    call("fit", "--config", f"configs/{config}.yaml", "--trainer.default_root_dir", str(folder / "run"), *options)
    accuracies = {}
    for moment, model in (("before", "builtin:tiny"), ("after", str(folder / "run"))):
        output = folder / f"{moment}.json"
        call("eval", "--model", model, *MATH, "--num-episodes", "500", "--seed", str(seed), "--output", str(output))
        accuracies[moment] = json.loads(output.read_text())["accuracy"]
    return accuracies


def seconds_of_children() -> float:
    """Return the CPU time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(config: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return one row of the table."""
    used = seconds_of_children()
    learn = from_episodes if config.startswith(("algorithms/sft", "algorithms/preferences")) else from_rollouts
    with tempfile.TemporaryDirectory() as folder:
        found = learn(config, seed, Path(folder), overrides)
    return {"config": config, "seed": seed, "cpu_s": round(seconds_of_children() - used, 1), **found}


def curve(config: str, seed: int, folder: Path, data: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the steps and values of each measure during a run in a folder, and its CPU seconds without collection."""
    wanted = CURVES[config]
    options = ["--trainer.default_root_dir", str(folder), "--seed_everything", str(seed)]
    for option, name in wanted.files.items():
        options += [f"--data.{option}", str(collected(name, seed, data))]
    if "accuracy" in wanted.measures:
        options += ["--trainer.callbacks+", "HeldOutEvaluation", "--trainer.callbacks.episodes", "500"]
        options += ["--trainer.callbacks.every", str(wanted.every)]
    else:
        options += ["--trainer.val_check_interval", str(wanted.every), "--trainer.check_val_every_n_epoch", "null"]
    used = seconds_of_children()
    call("fit", "--config", f"configs/{config}.yaml", *options, *wanted.options, *overrides)
    seconds, measured = seconds_of_children() - used, {}
    for name, axis in wanted.measures.items():
        points = evaluated(folder) if name == "accuracy" else logged(folder, name)
        measured[axis] = {"steps": [*points], "values": [round(value, 4) for value in points.values()]}
    return {"config": config, "seed": seed, "cpu_s": round(seconds, 1), "measured": measured}


def evaluated(folder: Path) -> dict[int, float]:
    """Return the accuracies of a run on validation tasks by optimizer step."""
    points = json.loads((folder / "evaluation_curve.json").read_text())["points"]
    return {point["step"]: report["accuracy"] for point in points for report in point["environments"].values()}


def logged(folder: Path, metric: str) -> dict[int, float]:
    """Return the values of a run's metric by the number of optimizer steps behind them."""
    with (folder / "metrics.csv").open() as file:
        return {int(row["step"]) + 1: float(row[metric]) for row in csv.DictReader(file) if row[metric]}


def main() -> None:
    """Run every configuration with every seed and print a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", help="paths below configs/, without .yaml, with options; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--curves", action="store_true", help="measure fixed data and distillation during training")
    parser.add_argument("--data", type=Path, help="folder that keeps the files of --curves; default: none is kept")
    parser.add_argument("--json", type=Path)
    options, overrides = parser.parse_known_args()
    configs = options.configs or [*(CURVES if options.curves else CONFIGS)]
    if options.curves and {*configs} - {*CURVES}:
        parser.error(f"--curves has the configurations {', '.join(CURVES)}")
    written: dict[str, Any] = {}
    if options.json and options.json.exists():
        written = json.loads(options.json.read_text())
    kept = written.get("curves", {}) if options.curves else written
    rows: list[dict[str, Any]] = kept.get("rows", [])
    done = {(row["config"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as temporary:
        data = options.data or Path(temporary)
        for config in configs:
            for seed in options.seeds:
                if (config, seed) in done:
                    continue
                if options.curves:
                    with tempfile.TemporaryDirectory() as folder:
                        rows.append(curve(config, seed, Path(folder), data, overrides))
                else:
                    rows.append(run(config, seed, overrides))
                print(json.dumps(rows[-1]), flush=True)
                if options.json:
                    found = {**provenance(kept=kept or None), "rows": rows}
                    written = {**written, "curves": found} if options.curves else {**written, **found}
                    options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
