"""Compare executions per second and start latency of each sandbox level with ``subprocess``; time concurrent episodes.

    python benchmarks/speed/sandbox.py [--executions 60] [--rounds 5] [--episodes 16] [--json FILE]

The plain side starts ``python -I -S -c`` for every program, with an empty environment, its own session and limits of
memory, time and files, without other confinement. All sides run in turn in each round; figures are medians over the
rounds, and ratios are medians of the ratios within a round. A start lasts until the program can run: on the plain side
until its first byte of output. An episode waits from its reply to its reward.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.code.generated import ENTRY

from mrlm_pl.environment import Message
from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import STRENGTH, Sandbox
from mrlm_pl.sandbox.host.server_process import server

PROGRAM, PRINTED = "print(6 * 7)", "42\n"
LIMITED = (
    "import resource\n"
    "for kind, most in ((resource.RLIMIT_AS, 512 << 20), (resource.RLIMIT_CPU, 6), (resource.RLIMIT_NOFILE, 64),\n"
    "                   (resource.RLIMIT_FSIZE, 64 << 20), (resource.RLIMIT_CORE, 0)):\n"
    "    resource.setrlimit(kind, (most, most))\n"
)
PLAIN = "subprocess"
WORKERS = (1, 2)
ENDLESS = f"```python\ndef {ENTRY}(*x):\n    while True: pass\n```"


def started_plainly() -> subprocess.Popen[str]:
    """Start a new interpreter with limits that runs the program."""
    command = [sys.executable, "-I", "-S", "-c", LIMITED + PROGRAM]
    return subprocess.Popen(command, env={}, stdout=subprocess.PIPE, text=True, start_new_session=True)


def run_plainly() -> str:
    """Return the program's output in a new interpreter."""
    with started_plainly() as process:
        return process.communicate(timeout=30)[0]


def start_plainly() -> float:
    """Return the seconds until a new interpreter prints."""
    started = time.perf_counter()
    with started_plainly() as process:
        assert process.stdout is not None
        process.stdout.read(1)
        return time.perf_counter() - started


def run_cell(sandbox: Sandbox) -> str:
    """Return the program's output in the sandbox."""
    return sandbox.run(PROGRAM).output


def start_cell(sandbox: Sandbox) -> float:
    """Return the seconds until a child is locked down and ready."""
    started = time.perf_counter()
    with sandbox.open():
        return time.perf_counter() - started


def speed(run: Callable[[], str], executions: int, workers: int) -> float:
    """Return executions per second.

    Raises:
        RuntimeError: a program has the wrong output.
    """
    started = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        outputs = list(pool.map(lambda _: run(), range(executions)))
    seconds = time.perf_counter() - started
    if set(outputs) != {PRINTED}:
        raise RuntimeError(f"a program printed {set(outputs)}")
    return executions / seconds


def measure(executions: int, rounds: int) -> list[dict[str, Any]]:
    """Return medians of every side, and their ratios to the plain one."""
    sides: dict[str, tuple[Callable[[], str], Callable[[], float]]] = {PLAIN: (run_plainly, start_plainly)}
    for level in STRENGTH:
        try:
            server(level)
        except SandboxError as refused:
            print(f"{level:<12}not offered: {refused}")
            continue
        sandbox = Sandbox(level=level)
        sides[level] = (partial(run_cell, sandbox), partial(start_cell, sandbox))
    speeds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in sides for count in WORKERS}
    starts: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (run, start) in sides.items():
            run()
            for count in WORKERS:
                speeds[name, count].append(speed(run, executions, count))
            starts[name] += [start() for _ in range(executions)]
    return [row(name, speeds, starts[name]) for name in sides]


def row(name: str, speeds: dict[tuple[str, int], list[float]], starts: list[float]) -> dict[str, Any]:
    """Return the figures of one side."""
    found: dict[str, Any] = {"side": name}
    for count in WORKERS:
        ratios = [ours / plain for ours, plain in zip(speeds[name, count], speeds[PLAIN, count], strict=True)]
        found[f"per_second_{count}"] = round(statistics.median(speeds[name, count]), 1)
        found[f"ratio_{count}"] = round(statistics.median(ratios), 2)
    ordered = sorted(starts)
    found["start_p50_ms"] = round(1e3 * ordered[len(ordered) // 2], 1)
    found["start_p99_ms"] = round(1e3 * ordered[int(0.99 * len(ordered))], 1)
    return found


def episodes_at_once(count: int, endless: int) -> dict[str, Any]:
    """Return the waits of concurrent programming episodes, some with a program that does not end."""
    environment = CodeEnvironment(sandbox=Sandbox(wall_seconds=1.0))
    source = environment.tasks("train")
    environment.sandbox.run("")

    def wait(index: int) -> float:
        played = copy.deepcopy(environment)
        task = source[index]
        played.reset(task)
        gold = played.gold(task)
        assert gold is not None
        reply = ENDLESS if index < endless else gold["agent"][0]
        started = time.perf_counter()
        step = played.step({"agent": Message("assistant", reply)})
        waited = time.perf_counter() - started
        if (step.rewards["agent"] > 0) != (index >= endless) or (index < endless and waited < 1):
            raise RuntimeError(f"episode {index} got the rewards {step.rewards} after {waited} s")
        return waited

    started = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        waits = list(pool.map(wait, range(count)))
    return {
        "episodes": count,
        "endless": endless,
        "seconds": round(time.perf_counter() - started, 2),
        "median_wait": round(statistics.median(waits), 2),
        "longest_wait": round(max(waits), 2),
    }


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executions", type=int, default=60, help="programs per side and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=16, help="number of concurrent episodes")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    rows = measure(arguments.executions, arguments.rounds)
    for found in rows:
        print(
            f"{found['side']:<12}1 worker {found['per_second_1']:6.1f}/s ratio {found['ratio_1']:5.2f}   "
            f"2 workers {found['per_second_2']:6.1f}/s ratio {found['ratio_2']:5.2f}   "
            f"start p50 {found['start_p50_ms']:5.1f} ms p99 {found['start_p99_ms']:5.1f} ms"
        )
    waits = [episodes_at_once(arguments.episodes, endless) for endless in (0, arguments.episodes // 4)]
    for found in waits:
        print(
            f"{found['episodes']} concurrent episodes, {found['endless']} with an endless program (limit 1 s): "
            f"{found['seconds']} s, median wait {found['median_wait']} s, longest {found['longest_wait']} s"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"processors": os.cpu_count(), "rows": rows, "episodes": waits}, file, indent=2)


if __name__ == "__main__":
    main()
