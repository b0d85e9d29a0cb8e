"""SIGKILL at random moments: does the resumed run end with the weights of an uninterrupted one?

    python benchmarks/robustness/kill_resume.py [--configs quickstart algorithms/ppo] [--kills 20] [--chain 5]
        [--seed 0] [OVERRIDES ...]

For each configuration one run is left alone; others are killed ``chain`` times each, at moments drawn evenly from
their training time or as soon as the draft of a checkpoint is seen, and continued with ``mrlm train --resume`` until
they end. Printed are the hashes of the final weights and what each kill interrupted, told from what it left: the
progress of the run, and the draft of a checkpoint. Exit status 1 when a hash differs. One thread and a checkpoint at
every update, so that kills also hit the writing.
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
from pathlib import Path
from typing import Any

SHORT = ["--data.iterations", "8", "--data.groups", "16", "--trainer.callbacks", "[]"]


def command(config: str, folder: Path, overrides: list[str]) -> list[str]:
    """Start a run in a folder, or go on with it."""
    mrlm = str(Path(sys.executable).with_name("mrlm"))
    return [
        *(mrlm, "train", "--config", f"configs/{config}.yaml", "--output", str(folder), "--resume"),
        *("--checkpoint.every_n_train_steps", "1", "--trainer.enable_progress_bar", "false"),
        *SHORT,
        *overrides,
    ]


def start(config: str, folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """The process of a run; what it says goes to a file beside the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with Path(f"{folder}.log").open("ab") as log:
        return subprocess.Popen(command(config, folder, overrides), stdout=log, stderr=log, env=environment)


def begun(folder: Path, process: subprocess.Popen[bytes], before: int) -> None:
    """Wait until the process trains: a checkpoint newer than ``before`` (in nanoseconds) is there."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    while process.poll() is None and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > before):
        time.sleep(0.01)


def finish(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Hash of the weights of a run that was left to end."""
    if process.wait():
        raise SystemExit(f"{folder}: exit status {process.returncode}\n{Path(f'{folder}.log').read_text()[-3000:]}")
    return hashlib.sha256((folder / "policies" / "main" / "model.safetensors").read_bytes()).hexdigest()[:16]


def killed(config: str, folder: Path, overrides: list[str], chain: int, span: float, rng: random.Random) -> Any:
    """Kill a run ``chain`` times and let it end: the hash, and what each kill left."""
    kills: list[dict[str, Any]] = []
    for _ in range(chain):
        now = time.time_ns()
        process = start(config, folder, overrides)
        moment = rng.uniform(0.0, span)
        if kills or rng.random() < 0.8:  # now and then during the start as well
            begun(folder, process, now)
        else:
            moment += 2.0
        draft = folder / "checkpoints" / "last.ckpt.part"
        if kills and rng.random() < 0.3:  # in the few milliseconds in which a checkpoint is written
            while process.poll() is None and not draft.exists():
                time.sleep(0.0002)
            moment = 0.0
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            collections = len(list((folder / "episodes").glob("*.gz"))) if folder.exists() else 0
            kills.append({"after_s": round(moment, 2), "collections": collections, "draft": draft.exists()})
        else:
            if process.returncode:
                raise SystemExit(Path(f"{folder}.log").read_text()[-3000:])
            break
    return finish(start(config, folder, overrides), folder), kills


def main() -> None:
    """Run all configurations and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["quickstart", "algorithms/ppo"])
    parser.add_argument("--kills", type=int, default=20, help="of each configuration")
    parser.add_argument("--chain", type=int, default=5, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options, overrides = parser.parse_known_args()
    rng, wrong = random.Random(options.seed), 0
    for config in options.configs:
        root = Path(tempfile.mkdtemp())
        began = time.time_ns()
        process = start(config, root / "whole", overrides)
        begun(root / "whole", process, began)
        training = time.perf_counter()
        expected = finish(process, root / "whole")
        span = time.perf_counter() - training
        done, number = 0, 0
        while done < options.kills:
            number += 1
            # A run goes on from its last checkpoint, so that later kills of a chain come in what is left.
            found, kills = killed(config, root / f"run-{number}", overrides, options.chain, span / 3, rng)
            done += len(kills)
            wrong += found != expected
            print(json.dumps({"config": config, "same": found == expected, "hash": found, "kills": kills}), flush=True)
        print(json.dumps({"config": config, "hash": expected, "training_s": round(span, 1), "kills": done}), flush=True)
    if wrong:
        raise SystemExit(f"{wrong} runs ended with other weights")


if __name__ == "__main__":
    main()
