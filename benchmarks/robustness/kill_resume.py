"""Kill runs by SIGKILL at random moments, resume them, and compare the final weights with an uninterrupted run's.

    python -m benchmarks.robustness.kill_resume [--cases sft grpo_validated] [--kills 9] [--chain 3] [--seed 0]
        [--output FILE] [OVERRIDES ...]

For each case one run is undisturbed; others are killed ``chain`` times each, at moments drawn uniformly from their
training time or as soon as a temporary checkpoint file appears, and resumed with ``mrlm train --resume`` until they
end. The result holds the hashes of the final weights and, for each kill, the rollouts on disk and whether a temporary
checkpoint file remained. Exit status 1 if a hash differs. One thread and a checkpoint at every update, so that kills
also hit the writing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.provenance import provenance

MRLM = str(Path(sys.executable).with_name("mrlm"))
COLLECT = (
    *("collect", "--model", "builtin:tiny", "--environment", "math", "--environment.difficulty", "[1, 1]"),
    *("--max-tokens", "32", "--num-episodes", "384"),
)
NO_CALLBACKS = ("--trainer.callbacks", "[]")


class Case(NamedTuple):
    """A configuration, its overrides, and the command that collects its training rows."""

    config: str
    changes: tuple[str, ...]
    rows: tuple[str, ...] = ()


CASES = {
    "grpo": Case("quickstart", ("--data.iterations", "8", "--data.groups", "16", *NO_CALLBACKS)),
    "grpo_validated": Case(
        "quickstart",
        (
            *("--trainer.max_epochs", "3", "--data.iterations", "4", "--data.groups", "16"),
            *("--trainer.val_check_interval", "2", "--trainer.limit_val_batches", "1.0"),
            *("--data.validation_episodes", "32", *NO_CALLBACKS),
        ),
    ),
    "ppo": Case("algorithms/ppo", ("--data.iterations", "8", "--data.groups", "16", *NO_CALLBACKS)),
    "magrpo": Case("algorithms/teams/magrpo", ("--data.iterations", "12", "--data.validation_episodes", "16")),
    # 12 updates in each of 3 epochs; the rows of a batch are packed.
    "sft": Case("algorithms/sft", ("--data.batch_size", "12", "--data.filter_reward", "1"), COLLECT),
    "dpo": Case(
        "algorithms/preferences/dpo",
        ("--data.batch_size", "4", "--trainer.max_epochs", "2"),
        (*COLLECT, "--samples-per-task", "8"),
    ),
}


def start(case: Case, folder: Path, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    """Return a process that starts or resumes the run of a folder and logs to a file beside it."""
    rows = folder.parent / "rows.jsonl"
    command = [
        *(MRLM, "train", "--config", f"configs/{case.config}.yaml", "--output", str(folder), "--resume"),
        *("--checkpoint.every_n_train_steps", "1", "--trainer.enable_progress_bar", "false"),
        *(("--data.train", str(rows)) if case.rows else ()),
        *case.changes,
        *overrides,
    ]
    with Path(f"{folder}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def begun(folder: Path, process: subprocess.Popen[bytes], before: int) -> None:
    """Wait until the process trains: a checkpoint newer than ``before`` (in nanoseconds) is there."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
        time.sleep(0.01)


def finish(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait for the end of a run and return the hash of all its policies' weights."""
    if process.wait():
        raise SystemExit(f"{folder}: exit status {process.returncode}\n{Path(f'{folder}.log').read_text()[-3000:]}")
    digest = hashlib.sha256()
    for path in sorted(folder.glob("policies/*/model.safetensors")):
        digest.update(path.parent.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def killed(
    case: Case, folder: Path, overrides: Sequence[str], chain: int, span: float, rng: random.Random
) -> tuple[str, list[dict[str, Any]]]:
    """Kill a run ``chain`` times and let it end; return its hash and a record of each kill."""
    kills: list[dict[str, Any]] = []
    for _ in range(chain):
        now = time.time_ns()
        process = start(case, folder, overrides)
        moment = rng.uniform(0.0, span)
        if kills or rng.random() < 0.8:  # otherwise also during the start
            begun(folder, process, now)
        else:
            moment += 2.0
        draft = folder / "checkpoints" / "last.ckpt.part"
        if kills and rng.random() < 0.3:  # in the few milliseconds of writing a checkpoint
            while process.poll() is None and not draft.exists():
                time.sleep(0.0002)
            moment = 0.0
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            collections = len(list((folder / "episodes").glob("*.zst"))) if folder.exists() else 0
            kills.append({"after_s": round(moment, 2), "collections": collections, "draft": draft.exists()})
        else:
            if process.returncode:
                raise SystemExit(Path(f"{folder}.log").read_text()[-3000:])
            break
    return finish(start(case, folder, overrides), folder), kills


def measured(case: Case, overrides: Sequence[str], kills: int, chain: int, rng: random.Random) -> dict[str, Any]:
    """Return the hashes of the undisturbed and the killed runs."""
    root = Path(tempfile.mkdtemp())
    if case.rows:
        subprocess.run([MRLM, *case.rows, "--output", str(root / "rows.jsonl")], check=True)
    began = time.time_ns()
    process = start(case, root / "whole", overrides)
    begun(root / "whole", process, began)
    training = time.perf_counter()
    expected = finish(process, root / "whole")
    span = time.perf_counter() - training
    runs: list[dict[str, Any]] = []
    while (done := sum(len(run["kills"]) for run in runs)) < kills:
        # A run resumes from its last checkpoint, so later kills of a chain come in the remaining part.
        left = min(chain, kills - done)
        found, chained = killed(case, root / f"run-{len(runs)}", overrides, left, span / 3, rng)
        runs.append({"hash": found, "same": found == expected, "kills": chained})
        print(json.dumps(runs[-1]), flush=True)
    return {
        "config": case.config,
        "changes": [*case.changes, *overrides],
        "hash": expected,
        "training_s": round(span, 1),
        "kills": done,
        "same": sum(run["same"] for run in runs),
        "runs": runs,
    }


def main() -> None:
    """Run all cases, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kills", type=int, default=9, help="kills per case")
    parser.add_argument("--chain", type=int, default=3, help="kills per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--output", type=Path, help="JSON file; keeps the other cases of an existing one")
    options, overrides = parser.parse_known_args()
    found = json.loads(options.output.read_text()) if options.output and options.output.exists() else {"cases": {}}
    found |= provenance(kept=found if "command" in found else None)
    wrong = 0
    for name in options.cases:
        result = measured(CASES[name], overrides, options.kills, options.chain, random.Random(f"{options.seed} {name}"))
        wrong += len(result["runs"]) - result["same"]
        print(name, json.dumps({key: result[key] for key in ("hash", "kills", "training_s")}), flush=True)
        found["cases"][name] = result
        if options.output:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    if wrong:
        raise SystemExit(f"{wrong} runs ended with other weights")


if __name__ == "__main__":
    main()
