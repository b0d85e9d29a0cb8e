"""``mrlm sweep``: train a configuration with several seeds and settings, side by side, and compare the runs."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.cli.commands.report import add_options, write
from mrlm_pl.cli.parsing.config_files import config_files, option_values, with_underscores
from mrlm_pl.cli.parsing.early_check import check
from mrlm_pl.durable_files import write_json
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.state import STATE, state_of
from mrlm_pl.settings import at_least
from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.seeds import compare_seeds

COMMAND = (sys.executable, "-m", "mrlm_pl.cli.main", "train")
RESERVED = ("--resume", "--seed_everything", "--trainer.output", "--trainer.resume", "--trainer.default_root_dir")
"""Options of ``mrlm fit`` that a sweep sets."""

FINISHED = "finished"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Member:
    """A run of a sweep: its folder, and its options of ``mrlm fit``."""

    folder: Path
    words: tuple[str, ...]

    @property
    def state(self) -> str:
        """Return the state in the run's folder; see :func:`mrlm_pl.runs.state.state_of`."""
        path = self.folder / STATE
        return state_of(path.read_text(encoding="utf-8") if path.is_file() else "")[0]


def run(arguments: Sequence[str]) -> int:
    """Train all runs that are not finished and print the report; return exit status 1 if one failed.

    Raises:
        ConfigurationError: a mistake in the options, the folder holds a sweep with other options, or another process
            trains one of its runs.
    """
    parser = argparse.ArgumentParser(
        prog="mrlm sweep",
        usage="mrlm sweep --config FILE --seeds N --output FOLDER [--grid KEY=VALUE,VALUE ...] [options of mrlm fit]",
        description=__doc__.partition(": ")[2],
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, required=True, help="runs of each setting, with the seeds 0 to N - 1")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="folder of the runs")
    text = "values of an option of mrlm fit; several keys make all combinations"
    parser.add_argument("--grid", nargs="+", default=[], metavar="KEY=VALUE,VALUE", help=text)
    parser.add_argument("--jobs", type=int, help="runs at once; default: one for each core, or 1 with a GPU")
    add_options(parser)
    options, words = parser.parse_known_args(arguments)
    at_least(1, "", seeds=options.seeds, jobs=options.jobs)
    for option, _ in option_values(words):
        if option in RESERVED:
            raise ConfigurationError(f"{option[2:]}: `mrlm sweep` sets it for each run; leave it out")
    members = list(planned(options.output, words, options.seeds, options.grid))
    for member in members[:: options.seeds]:
        check(member.words)
    if busy := [str(member.folder) for member in members if member.state == "running"]:
        raise ConfigurationError(f"output: another process trains {', '.join(busy)}; wait for its end or end it")
    _record(options.output, words)
    failed = played(members, options.jobs or _places(), options.output / "logs")
    finished = [str(member.folder) for member in members if member.state == FINISHED]
    if finished:
        found = compare_seeds(find_runs(finished), options.metric, options.at)
        print(found.markdown(), end="")
        write(found, [options.output / "report.md", options.output / "curves.csv"])
    for member, reason in failed.items():
        print(f"mrlm: {member.folder} failed: {reason}", file=sys.stderr)
    return 1 if failed else 0


def planned(output: Path, words: Sequence[str], seeds: int, grid: Sequence[str]) -> Iterator[Member]:
    """Yield the runs: all seeds of each combination of the grid's values.

    Args:
        output: folder of their folders.
        words: options of ``mrlm fit`` that all have.
        seeds: their number.
        grid: ``KEY=VALUE,VALUE`` for each key.

    Raises:
        ConfigurationError: an item of the grid has another form, or is there twice.

    >>> [str(member.folder) for member in planned(Path("s"), [], 1, ["data.groups=2,4"])]
    ['s/groups=2/seed-0', 's/groups=4/seed-0']
    """
    values = dict(_values(item) for item in grid)
    short = [key.rpartition(".")[2] for key in values]
    names = short if len(set(short)) == len(short) else list(values)
    if len(values) < len(grid):
        raise ConfigurationError(f"grid: {', '.join(values)} are given twice; write all values of a key as KEY=A,B")
    taken = set[str]()
    for cell in itertools.product(*values.values()):
        label = ",".join(f"{name}={value}" for name, value in zip(names, cell, strict=True))
        folder = re.sub(r"[^\w.=,+-]", "_", label)
        if folder in taken:
            raise ConfigurationError(f"grid: several values are named {folder!r} as a folder; sweep them one by one")
        taken.add(folder)
        chosen = [word for key, value in zip(values, cell, strict=True) for word in (f"--{key}", value)]
        for seed in range(seeds):
            place = output / folder / f"seed-{seed}"
            own = ("--seed_everything", str(seed), "--output", str(place), "--resume")
            yield Member(place, (*words, *chosen, *own))


def played(members: Sequence[Member], jobs: int, logs: Path) -> Mapping[Member, str]:
    """Train the runs that are not finished, some at once; return those that failed, each with the reason.

    Ctrl-C and SIGTERM end all runs in order: they save their checkpoints.

    Args:
        members: the runs.
        jobs: processes at once.
        logs: folder of their output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting = [member for member in members if member.state != FINISHED]
    done, total = len(members) - len(waiting), len(members)
    threads = {"OMP_NUM_THREADS": str(max(1, _cores() // jobs))}
    running: dict[Member, subprocess.Popen[bytes]] = {}
    failed: dict[Member, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                member = waiting.pop(0)
                with _log(logs, member).open("ab") as log:
                    running[member] = subprocess.Popen(
                        [*COMMAND, *member.words],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**threads, **os.environ},
                        start_new_session=True,  # the terminal's Ctrl-C reaches this process alone, which passes it on
                    )
            for member, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[member]
                done += 1
                if process.returncode:
                    failed[member] = f"exit status {process.returncode}; see {_log(logs, member)}"
                print(f"mrlm: {done} of {total}: {member.folder} {'failed' if process.returncode else 'is finished'}")
            time.sleep(POLL_SECONDS)
    finally:
        for process in running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in running.values():
            process.wait()
    return failed


def _values(item: str) -> tuple[str, list[str]]:
    """Return the key and the values of an item of the grid.

    >>> _values("data.environment.difficulty=[1, 1],[1, 2]")
    ('data.environment.difficulty', ['[1, 1]', '[1, 2]'])
    """
    key, _, text = item.partition("=")
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        values = None
    if not key or not values:
        raise ConfigurationError(
            f"grid: {item!r} must be KEY=VALUE,VALUE, as in model.policies.main.learning_rate=1e-4,1e-3"
        )
    (option,) = with_underscores([f"--{key}"])
    return option[2:], [value if isinstance(value, str) else json.dumps(value) for value in values]


def _record(output: Path, words: Sequence[str]) -> None:
    """Write the options of a sweep, or check that those of an earlier call are the same.

    Raises:
        ConfigurationError: they differ; its runs would be of several kinds.
    """
    own: dict[str, Any] = {
        "options": list(words),
        "files": {str(path): path.read_text(encoding="utf-8") for path in config_files(words)},
    }
    record = output / "sweep.json"
    if record.is_file() and json.loads(record.read_text(encoding="utf-8")) != own:
        raise ConfigurationError(
            f"output: {str(output)!r} holds a sweep with other options or another content of its configuration files; "
            "name another --output"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_json(record, own)


def _log(logs: Path, member: Member) -> Path:
    return logs / f"{'-'.join(member.folder.parts[-2:])}.log"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _places() -> int:
    """Return the default number of runs at once."""
    import torch

    return 1 if torch.cuda.is_available() else _cores()
