"""Compare GRPO's step time beside a busy process with an idle machine, by OpenMP setting, in one run.

    python benchmarks/speed/shared_machine.py [--size s] [--rounds 3] [--json FILE]

Every round runs each setting without and with one busy process, each in its own process. Printed are the median step
times and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_models import SIZES, make_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
RUN = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import os
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
from grpo_step import run_ours
print(json.dumps(run_ours({folder!r}, {steps}, "32-true")))
"""


def step_seconds(folder: str, size: str, steps: int, setting: str, busy: bool) -> float:
    """Return the median step time of a process with an OpenMP setting; with ``busy``, beside a busy process."""
    program = RUN.format(benchmarks=str(Path(__file__).parent), folder=folder, size=size, steps=steps)
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        inherited = {name: value for name, value in os.environ.items() if "OMP_" not in name}
        environment = {**inherited, "HF_HUB_OFFLINE": "1", **SETTINGS[setting]}
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    finally:
        if hog is not None:
            hog.kill()
            hog.wait()
    if result.returncode:
        raise SystemExit(f"{setting}: {result.stderr[-2000:]}")
    return statistics.median(json.loads(result.stdout.splitlines()[-1])["steps"])


def main() -> None:
    """Run all settings in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="s")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    make_model(Path(folder), options.size)
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in range(options.rounds):
        for setting in SETTINGS:
            for busy in (False, True):
                seconds = step_seconds(folder, options.size, options.steps, setting, busy)
                times.setdefault((setting, busy), []).append(seconds)
    summary = {
        setting: {
            "quiet_s": statistics.median(times[setting, False]),
            "busy_s": statistics.median(times[setting, True]),
            "busy_by_quiet": statistics.median(times[setting, True]) / statistics.median(times[setting, False]),
        }
        for setting in SETTINGS
    }
    found = {**provenance(), "size": options.size, "rounds": options.rounds, "settings": summary}
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
