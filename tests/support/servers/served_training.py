"""Training runs in separate processes, on environments of servers, and their output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrlm_pl.compressed_files import unpacked

ROOT = Path(__file__).parents[3]
GROUPS, GROUP_SIZE = 4, 8
HERE = json.dumps({"class_path": "MathEnvironment", "init_args": {"difficulty": [1, 1]}})


def fit(folder: Path, *arguments: str, environment: str) -> subprocess.Popen[str]:
    """Start the quick-start with few groups on an environment, given as JSON with ``class_path`` and ``init_args``."""
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", "--config", "configs/quickstart.yaml"]
    without_settings = json.dumps({**json.loads(environment), "init_args": {}})  # keeps the file's other settings
    command += ["--data.environment", without_settings]
    options = {
        "--data.environment": environment,
        "--data.groups": str(GROUPS),
        "--data.group_size": str(GROUP_SIZE),
        "--trainer.default_root_dir": str(folder),
        "--trainer.callbacks": "null",
        "--trainer.enable_progress_bar": "false",
        "--trainer.accelerator": "cpu",
    }
    flat = [word for option in options.items() for word in option]
    return subprocess.Popen(
        [*command, *flat, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def serve_math(process: Callable[..., Any], *options: str, port: int = 0) -> Any:
    """Start ``mrlm serve`` with the quick-start's environment."""
    settings = ["-m", "mrlm_pl.cli.main", "serve", "--settings", str(ROOT / "configs" / "servers" / "math.yaml")]
    return process(arguments=[*settings, "--port", str(port), *options])


def serve_controller(process: Callable[..., Any], port: int = 0) -> Any:
    """Start ``mrlm serve --controller``."""
    return process(arguments=["-m", "mrlm_pl.cli.main", "serve", "--controller", "--port", str(port)])


def on(*targets: str) -> str:
    """Return the environment on these servers."""
    arguments = {"address": list(targets), "name": "math", "open_seconds": 60}
    return json.dumps({"class_path": "RemoteEnvironment", "init_args": arguments})


def finished(run: subprocess.Popen[str]) -> str:
    """Return the output of a successful run."""
    output, _ = run.communicate(timeout=400)
    assert run.returncode == 0, output[-3000:]
    return output


def collections(folder: Path) -> int:
    """Return the number of rollouts that a run has written."""
    return len(list((folder / "episodes").glob("*.zst")))


def episodes(folder: Path) -> list[dict[str, Any]]:
    """Return all written episodes of a run."""
    files = sorted((folder / "episodes").glob("*.zst"))
    return [json.loads(line) for path in files for line in b"".join(unpacked(path)).splitlines()]


def rewards(folder: Path) -> list[float]:
    """Return the reward of every turn of a run, in order."""
    return [
        turn["reward"]
        for episode in episodes(folder)
        for rows in episode["trajectories"].values()
        for row in rows
        for turn in row["turns"]
    ]
