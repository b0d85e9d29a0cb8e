"""Measure the start of the quick start up to its first update by phase, and that of the shortest commands.

    python benchmarks/speed/start_up.py [--rounds 5] [--threads 1] [--only NAME ...] [--against FOLDER ...]
        [--json FILE]

Each round starts every command once in its own process, and with ``--against`` also with the code of other
checkouts, in turns; the first round only fills the caches of files. Printed are medians, in seconds of the wall clock
and of the CPU. A phase excludes the modules that it imports: all of them, with the start of the interpreter, are the
first phase. ``validation`` plays the episodes of ``HeldOutEvaluation``, and with a validation loop its sanity check.
``the libraries of a fit alone`` is the least that a fit imports. About 1.5 s of the imports are torch itself, 1.3 s
its compiler (which Lightning imports, as does every optimizer of torch), 1 s transformers, and 0.2 s each Lightning
and torchmetrics, which imports matplotlib too (0.5 s) where that is installed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICK_START = ("fit", "--config", "{code}/configs/quickstart.yaml")
FITS = {
    "quick start": QUICK_START,
    "quick start with a validation loop": (*QUICK_START, "--trainer.limit_val_batches", "1.0"),
}
LIBRARIES = "the libraries of a fit alone"
COMMANDS = {
    "mrlm --help": ("-m", "mrlm_pl.cli.main", "--help"),
    "mrlm info": ("-m", "mrlm_pl.cli.main", "info"),
    "import mrlm_pl": ("-c", "import mrlm_pl"),
    LIBRARIES: (
        "-c",
        "import torch._dynamo, torchmetrics, lightning.pytorch, jsonargparse, transformers.models.llama.modeling_llama",
    ),
}
PHASES = ("interpreter and imports", "parsing", "model and data", "validation", "first rollout", "first update")
CLOCKS = ("wall seconds", "cpu seconds")
STARTED, TIMES = "MRLM_BENCHMARK_STARTED", "MRLM_BENCHMARK_TIMES"
"""Variables with the time at which a measured process was started, and the file for its times."""


class Phases:
    """The times at which the phases of a fit end, without its imports.

    Args:
        started: start time of the process, by :func:`time.time`.
        path: file that receives the seconds of each phase after the first update, with which the process ends.
    """

    def __init__(self, started: float, path: Path) -> None:
        self.wall_offset = time.time() - started - time.perf_counter()
        self.path = path
        self.depth, self.imports = 0, [0.0, 0.0]
        self.ends: list[list[float]] = []

    def now(self) -> list[float]:
        """Return the seconds of :data:`CLOCKS` since the start of the process."""
        return [time.perf_counter() + self.wall_offset, time.process_time()]

    def begin(self, module_of_fit: str) -> None:
        """Count the start of the interpreter as an import, and measure all imports from now on."""
        self.imports = self.now()
        bootstrap: Any = importlib._bootstrap  # the import statement calls this function
        load = bootstrap._find_and_load

        def measured(name: str, importer: Callable[..., Any]) -> Any:
            before = self.now()
            self.depth += 1
            try:
                return load(name, importer)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.imports = [
                        sum(item) - old for *item, old in zip(self.imports, self.now(), before, strict=True)
                    ]
                if name == module_of_fit:
                    self.observe(sys.modules[name])

        bootstrap._find_and_load = measured

    def end_phase(self, phase: str) -> None:
        """End a phase, once all before it have ended."""
        if len(self.ends) == PHASES.index(phase) - 1:
            self.ends.append([now - spent for now, spent in zip(self.now(), self.imports, strict=True)])

    def observe(self, fit: Any) -> None:
        """End the phases where the command and Lightning come to the next."""
        from lightning.pytorch.trainer import call

        checked, hooks = fit.RunCommand.before_instantiate_classes, call._call_callback_hooks

        def parsed(command: Any) -> None:
            self.end_phase("parsing")
            checked(command)

        def called(trainer: Any, hook_name: str, *arguments: Any, **options: Any) -> None:
            if hook_name in ("on_sanity_check_start", "on_train_start"):
                self.end_phase("model and data")
            if hook_name == "on_train_batch_start":
                self.end_phase("first rollout")
            if hook_name == "on_train_batch_end":
                self.end_phase("first update")
                self.write()
            hooks(trainer, hook_name, *arguments, **options)
            if hook_name == "on_train_start":
                self.end_phase("validation")

        fit.RunCommand.before_instantiate_classes = parsed
        call._call_callback_hooks = called

    def write(self) -> None:
        """Write the seconds by clock and phase, and end the process."""
        found: dict[str, dict[str, float]] = {}
        for clock, name in enumerate(CLOCKS):
            ends = [0.0, *(end[clock] for end in self.ends)]
            spent = [later - earlier for earlier, later in itertools.pairwise(ends)]
            seconds = dict(zip(PHASES, [self.imports[clock], *spent], strict=True))
            found[name] = {**seconds, "in all": sum(seconds.values())}
        self.path.write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)


def started(words: Sequence[str], code: Path, threads: int, **variables: str) -> dict[str, dict[str, float]]:
    """Run Python with the code of a checkout in an empty folder, and return its seconds in all, by clock."""
    sources = os.pathsep.join(str(code / name) for name in ("", "environments", "callbacks"))
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": str(threads), **variables}
    environment["PYTHONDONTWRITEBYTECODE"] = ""  # an installed package is compiled once, and not at each start
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        environment[STARTED] = str(time.time())
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output = process.stdout.read() if process.stdout else b""  # until the process ends
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{output.decode()}")
    return dict(zip(CLOCKS, ({"in all": wall}, {"in all": used.ru_utime + used.ru_stime}), strict=True))


def fit_phases(words: Sequence[str], code: Path, threads: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a fit by clock and phase."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        command = [word.format(code=code) for word in words]
        started([__file__, *command], code, threads, **{TIMES: str(times)})
        return dict(json.loads(times.read_text(encoding="utf-8")))


def medians(rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median over the rounds of each number."""
    return {
        clock: {name: statistics.median(found[clock][name] for found in rounds) for name in rounds[0][clock]}
        for clock in CLOCKS
    }


def ratios(
    ours: Sequence[dict[str, dict[str, float]]], others: Sequence[dict[str, dict[str, float]]]
) -> dict[str, float]:
    """Return by clock the median over the rounds of the ratio within a round."""
    return {
        clock: statistics.median(
            one[clock]["in all"] / other[clock]["in all"] for one, other in zip(ours, others, strict=True)
        )
        for clock in CLOCKS
    }


def commit(folder: Path) -> str:
    """Return the short name of the commit of a checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    from importlib.util import find_spec

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from provenance import provenance

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of OpenMP in each process")
    parser.add_argument("--only", nargs="+", choices=[*FITS, *COMMANDS], default=[*FITS, *COMMANDS], metavar="NAME")
    parser.add_argument("--against", nargs="+", type=Path, default=[], help="other checkouts of this repository")
    parser.add_argument("--json", type=Path, help="write the figures to this file, beside those that it has")
    options = parser.parse_args()
    sides = {"now": ROOT} | {commit(folder): folder.resolve() for folder in options.against}
    names = options.only
    rounds: dict[str, dict[str, list[Any]]] = {name: {side: [] for side in sides} for name in names}
    optional = [name for name in ("matplotlib", "scipy", "trio") if find_spec(name)]
    kept = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    result: dict[str, Any] = kept | provenance(kept=kept or None)
    for number in range(options.rounds + 1):
        for name in names:
            for side, code in sides.items():
                if name in FITS:
                    found = fit_phases(FITS[name], code, options.threads)
                else:
                    found = started(COMMANDS[name], code, options.threads)
                if number:
                    rounds[name][side].append(found)
        if not number:
            continue
        result |= {"rounds": number, "threads": options.threads, "optional": optional}
        for name, measured in rounds.items():
            result[name] = {side: medians(found) for side, found in measured.items()}
            for side in list(sides)[1:]:
                result[name][f"now / {side}"] = ratios(measured["now"], measured[side])
        if options.json:  # each round, so that a run that is ended keeps those before
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    if TIMES in os.environ:
        phases = Phases(float(os.environ[STARTED]), Path(os.environ[TIMES]))
        from mrlm_pl.cli.main import COMMANDS as MODULES
        from mrlm_pl.cli.main import main as command

        phases.begin(MODULES["fit"][0].partition(":")[0])
        sys.exit(command())
    main()
