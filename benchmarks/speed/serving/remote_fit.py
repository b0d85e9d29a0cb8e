"""Compare ``mrlm fit`` with its environment on a server and in process.

    python benchmarks/speed/serving/remote_fit.py [--config configs/quickstart.yaml] [--iterations 20] [--repeats 3]
        [--json FILE]

The same configuration and seed runs both ways, in turns, each in its own process; the server is ``mrlm serve`` with the
configuration's environment and arguments on the same machine, whose cores it shares. Exit status 1 if the rewards of
all rollouts and the final weights are not equal bit for bit. Printed are the medians over the repeats of sampled tokens
per second (without the first rollout), wall seconds and CPU seconds of the whole run, and the median ratios of adjacent
runs, remote over local: above 1 the remote run is faster in tokens per second, and slower in seconds. Other load on the
machine affects wall seconds more than CPU seconds.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from remote_load import Server

from mrlm_pl.runs.plugins import environments_by_name, import_environment

NUMBERS = ("tokens_per_second", "run_seconds", "run_cpu_seconds")


def environment_of(config: str) -> tuple[str, dict[str, Any]]:
    """Return the short name and the arguments of a configuration's environment."""
    described = yaml.safe_load(Path(config).read_text())["data"]["init_args"]["environment"]
    if isinstance(described, str):
        described = {"class_path": described}
    import_environment(described["class_path"])
    names = {cls.__name__: name for name, cls in environments_by_name().items()}
    return names.get(described["class_path"], described["class_path"]), described.get("init_args", {})


def children_cpu_seconds() -> float:
    """Return the CPU seconds of ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def collections(folder: Path) -> list[dict[str, str]]:
    """Return a run's metrics of each rollout."""
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row.get("rollout/reward")]


def fit(folder: Path, arguments: argparse.Namespace, environment: dict[str, Any] | None) -> dict[str, Any]:
    """Return the figures of one run, with its rewards and weights."""
    options = {
        "--config": arguments.config,
        "--data.iterations": str(arguments.iterations),
        "--trainer.default_root_dir": str(folder),
        "--trainer.callbacks": "null",
        "--trainer.enable_progress_bar": "false",
        "--trainer.accelerator": "cpu",
    }
    if environment is not None:
        options["--data.environment"] = json.dumps({"class_path": "RemoteEnvironment", "init_args": environment})
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", *(word for item in options.items() for word in item)]
    started, cpu = time.perf_counter(), children_cpu_seconds()
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.decode()[-3000:]}")
    seconds, cpu = time.perf_counter() - started, children_cpu_seconds() - cpu
    rows = collections(folder)
    speeds = [float(row["rollout/tokens_per_second"]) for row in rows[1:]]
    return {
        "tokens_per_second": statistics.median(speeds),
        "run_seconds": seconds,
        "run_cpu_seconds": cpu,
        "rewards": [row["rollout/reward"] for row in rows],
        "weights": {path.parent.name: path.read_bytes() for path in folder.glob("policies/*/model.safetensors")},
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of both sides, and their ratios."""
    name, settings = environment_of(arguments.config)
    runs: dict[str, list[dict[str, Any]]] = {"local": [], "remote": []}
    served_cpu: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "settings.yaml"
        path.write_text(yaml.safe_dump({name: settings}))
        server = Server("--settings", str(path))
        try:
            for repeat in range(arguments.repeats):
                for side in ("local", "remote"):
                    theirs = server.cpu_seconds()
                    there = {"address": server.target, "name": name} if side == "remote" else None
                    runs[side].append(fit(Path(folder) / f"{side}{repeat}", arguments, there))
                    if side == "remote":
                        served_cpu.append(server.cpu_seconds() - theirs)
        finally:
            server.stop()
    first = runs["local"][0]
    for side, found in runs.items():
        for run in found:
            if run["rewards"] != first["rewards"] or run["weights"] != first["weights"] or not run["weights"]:
                raise SystemExit(f"a {side} run differs from the first local one")
    row: dict[str, Any] = {"config": arguments.config, "iterations": len(first["rewards"]), "equal": True}
    for number in NUMBERS:
        for side, found in runs.items():
            row[f"{side}_{number}"] = round(statistics.median(run[number] for run in found), 2)
        pairs = zip(runs["remote"], runs["local"], strict=True)
        row[f"{number}_ratio"] = round(statistics.median(theirs[number] / ours[number] for theirs, ours in pairs), 3)
    row["server_cpu_seconds"] = round(statistics.median(served_cpu), 2)
    return row


def main() -> None:
    """Run the command line's measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="runs per side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    row = measure(arguments)
    print(json.dumps(row, indent=2))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
