"""``mrlm sweep``: train a configuration with several seeds and settings in parallel, and compare the runs."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.cli.commands.report import add_options, compare_metrics, write
from mrlm_pl.cli.parsing.config_files import config_files, option_values, with_underscores
from mrlm_pl.cli.parsing.early_check import check
from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.durable_files import write_json
from mrlm_pl.errors import ConfigurationError, tell, writing
from mrlm_pl.runs.state import LOCK, in_training, is_locked, state_in, try_lock
from mrlm_pl.sandbox.wall.kernel import ending_with_parent
from mrlm_pl.settings import at_least, between
from mrlm_pl.viewer.runs import find_runs

COMMAND = (sys.executable, "-m", "mrlm_pl.cli.main", "train")
RESERVED = (
    *("--output", "--resume", "--seed_everything"),
    *("--trainer.output", "--trainer.resume", "--trainer.default_root_dir"),
)
"""Options of ``mrlm fit`` that a sweep sets."""

MOST_SEEDS = 10_000
FINISHED, FAILED = "finished", "failed"
LOGS = "logs"
POLL_SECONDS = 0.2
GRACE_SECONDS = 300.0
"""Seconds for the runs to end after a signal, with an update, a checkpoint and the export."""
LONGEST_NAME = 120
"""Maximum number of letters of a folder's name before its hash."""


@dataclass(frozen=True)
class Cell:
    """A combination of the grid's values.

    Args:
        label: settings as ``NAME=VALUE,...``; empty without a grid.
        settings: keys and values of the combination.
    """

    label: str
    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Return the label as a folder's name, with a hash where it is too long or has odd characters.

        >>> Cell("model=builtin_tiny", ()).name, Cell("model=builtin:tiny", ()).name
        ('model=builtin_tiny', 'model=builtin_tiny-d963bed5')
        """
        plain = re.sub(r"[^\w.=,+-]", "_", self.label, flags=re.ASCII)[:LONGEST_NAME]
        if plain == self.label:
            return plain
        return f"{plain}-{hashlib.sha256(json.dumps([self.label, self.settings]).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Member:
    """A run of a sweep.

    Args:
        folder: run folder.
        cell: values of the grid.
        words: options of ``mrlm fit``.
        own: options that the sweep sets.
    """

    folder: Path
    cell: Cell
    words: tuple[str, ...]
    own: tuple[str, ...]


def run(arguments: Sequence[str]) -> int:
    """Train all runs that are not finished and print the report; return exit status 1 if one failed.

    Raises:
        ConfigurationError: a mistake in the options, or the folder holds a sweep with other options.
    """
    text = "Train a configuration with several seeds and settings in parallel, and compare the runs."
    parser = PlainParser("sweep", text)
    parser.usage = "mrlm sweep --config FILE --seeds N --output FOLDER [--grid KEY=VALUE,VALUE ...] [options of fit]"
    add = parser.add_argument
    add("--seeds", type=int, required=True, help="number of runs per setting, with seeds 0 to N - 1")
    add("--output", required=True, metavar="FOLDER", help="folder of the runs")
    text = "values of an option of mrlm fit; several keys give all combinations"
    add("--grid", nargs="+", action="extend", default=[], metavar="KEY=VALUE,VALUE", help=text)
    add("--jobs", type=int, help="concurrent runs; default: one per core, or 1 with a GPU")
    add_options(parser)
    options, words = parser.parse_known_args(arguments)
    between(1, MOST_SEEDS).check(seeds=options.seeds)
    at_least(1).check(jobs=options.jobs)
    if not options.output:
        raise ConfigurationError("output is ''; name a folder, as in `--output runs/sweep`")
    options.output = Path(options.output)
    members = list(plan_members(options.output, words, options.seeds, options.grid))
    for run_words in dict.fromkeys(member.words for member in members if _state(member.folder) != FINISHED):
        _check(run_words)
    import torch  # the checks of the runs have imported it

    with writing("output", options.output):
        (options.output / LOGS).mkdir(parents=True, exist_ok=True)
    with _alone(options.output):
        _record(options.output, words, members)
    jobs = options.jobs or (1 if torch.cuda.is_available() else _cores())
    failed = train_members(members, jobs, options.output / LOGS)
    with _alone(options.output):  # the last of several processes reports on all runs
        _report(members, failed, options)
    for member, reason in failed.items():
        tell(f"{member.folder} failed: {reason}")
    print("next:")
    if failed:
        print(f"  {shlex.join(['mrlm', 'sweep', *arguments])}  # trains the failed runs again")
    print(f"  mrlm view {shlex.quote(str(options.output))}  # runs, curves and episodes in a browser")
    return 1 if failed else 0


def plan_members(output: Path, words: Sequence[str], seeds: int, grid: Sequence[str]) -> Iterator[Member]:
    """Yield the runs: all seeds of each combination of the grid's values.

    Args:
        output: parent folder of the run folders.
        words: options of ``mrlm fit`` that all runs have.
        seeds: number of seeds.
        grid: values of each key, as ``KEY=VALUE,VALUE``.

    Raises:
        ConfigurationError: an item of the grid has another form or occurs twice, or an option is the sweep's own.

    >>> [str(member.folder) for member in plan_members(Path("s"), [], 1, ["data.groups=2,4"])]
    ['s/groups=2/seed-0', 's/groups=4/seed-0']
    """
    for cell in cells(grid):
        run_words = (*words, *(f"--{key}={value}" for key, value in cell.settings))  # values may begin with dashes
        for option, _ in option_values(run_words):
            if option in RESERVED:
                raise ConfigurationError(f"{option[2:]}: `mrlm sweep` sets it for each run; leave it out")
        for seed in range(seeds):
            folder = output / cell.name / f"seed-{seed}"
            yield Member(folder, cell, run_words, ("--seed_everything", str(seed), "--output", str(folder), "--resume"))


def cells(items: Sequence[str]) -> Iterator[Cell]:
    """Yield all combinations of the grid's values.

    Args:
        items: values of each key, as ``KEY=VALUE,VALUE``.

    Raises:
        ConfigurationError: an item has another form, or a key or value occurs twice.

    >>> [cell.label for cell in cells(["data.groups=2,4", "model.a.rate=1", "model.b.rate=2"])]
    ['groups=2,model.a.rate=1,model.b.rate=2', 'groups=4,model.a.rate=1,model.b.rate=2']
    """
    axes = [_values(item) for item in items]
    keys = [key for key, _ in axes]
    if double := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigurationError(f"grid: {double} is given twice; write all its values as {double}=A,B")
    short = [key.rpartition(".")[2] for key in keys]
    names = [name if short.count(name) == 1 else key for name, key in zip(short, keys, strict=True)]
    for cell in itertools.product(*(values for _, values in axes)):
        label = ",".join(f"{name}={value}" for name, value in zip(names, cell, strict=True))
        yield Cell(label, tuple(zip(keys, cell, strict=True)))


def _values(item: str) -> tuple[str, list[str]]:
    """Return the key and the values of an item, as they are written.

    >>> _values("data.environment.difficulty=[1, 1],[1, 2]")
    ('data.environment.difficulty', ['[1, 1]', '[1, 2]'])
    """
    key, _, text = item.partition("=")
    values = _split(text)
    if not key or not values or not all(values):
        raise ConfigurationError(f"grid: {item!r} must be KEY=VALUE,VALUE, as in data.groups=2,4")
    (option,) = with_underscores([f"--{key}"])
    if double := next((value for value in values if values.count(value) > 1), None):
        raise ConfigurationError(f"grid: {option[2:]} has the value {double} twice; remove one")
    return option[2:], values


def _split(text: str) -> list[str] | None:
    """Return the parts between commas outside brackets and quotes; None if one stays open.

    >>> _split('{qestion},"a, b",[1, 1],don\\'t'), _split("[1"), _split("1]")
    (['{qestion}', '"a, b"', '[1, 1]', "don't"], None, None)
    """
    listed = f"[{text}]"
    try:
        node = yaml.compose(listed)
    except yaml.YAMLError:
        return None
    assert isinstance(node, yaml.SequenceNode)
    return [listed[part.start_mark.index : part.end_mark.index].strip() for part in node.value]


def train_members(members: Sequence[Member], jobs: int, logs: Path) -> Mapping[Member, str]:
    """Train the unfinished runs, several concurrently; return those that failed, each with the reason.

    Runs that other processes train, and those that failed there meanwhile, are left to them. Ctrl-C and SIGTERM end all
    runs cleanly: they save their checkpoints.

    Args:
        members: runs of the sweep.
        jobs: number of concurrent processes.
        logs: folder of the runs' output.
    """
    logs.mkdir(parents=True, exist_ok=True)
    before = {member: _state(member.folder) for member in members}
    waiting = [member for member in members if before[member] != FINISHED]
    total, jobs = len(members), min(jobs, max(1, len(waiting)))
    threads = {"OMP_NUM_THREADS": str(max(1, _cores() // jobs))}
    elsewhere: list[Member] = []
    running: dict[Member, subprocess.Popen[bytes]] = {}
    failed: dict[Member, str] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                member = waiting.pop(0)
                if process := _start(member, _log(logs, member), before[member], threads):
                    running[member] = process
                else:
                    elsewhere.append(member)
            for member, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[member]
                waiting, elsewhere = [*waiting, *elsewhere], []  # a process that trained them may have been killed
                done = sum(_state(member.folder) == FINISHED for member in members) + len(failed)
                if process.returncode:
                    log = _log(logs, member)
                    failed[member] = f"exit status {process.returncode}: {_last_line(log)}; see {log}"
                print(f"mrlm: {done} of {total}: {member.folder} {'failed' if process.returncode else 'is finished'}")
            time.sleep(POLL_SECONDS)
    finally:
        if running:
            _end(running)
    for member in elsewhere:
        print(f"mrlm: {member.folder} is left to another process, which trains it or has trained it")
    return failed


def _start(member: Member, log: Path, before: str, threads: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Start a run; return None if another process trains it, or has trained it since its state was ``before``."""
    with log.open("ab") as output:
        # The run has this file, and so its lock, until it ends.
        state = _state(member.folder) if try_lock(output.fileno()) else "running"
        if state == "running" or (state in (FINISHED, FAILED) and state != before):
            return None
        return subprocess.Popen(
            [*ending_with_parent(signal.SIGTERM), *COMMAND, *member.words, *member.own],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**threads, **os.environ},
            start_new_session=True,  # the terminal's Ctrl-C reaches this process alone, which passes it on
        )


def _end(running: Mapping[Member, subprocess.Popen[bytes]]) -> None:
    """End runs in order, and kill those left at Ctrl-C or after ``GRACE_SECONDS``; they keep their last checkpoints."""
    with suppress(ValueError):  # of a thread, which no signal interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the default action would leave them behind
    for number, process in itertools.product((signal.SIGTERM, signal.SIGCONT), running.values()):
        with suppress(ProcessLookupError):  # a stopped run gets the first signal when it continues
            os.killpg(process.pid, number)
    deadline = time.monotonic() + GRACE_SECONDS
    for member, process in running.items():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            deadline = 0.0
            tell(f"{member.folder} had not ended cleanly and was killed")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _check(words: Sequence[str]) -> None:
    """Validate the options of a run as ``mrlm fit`` does.

    Raises:
        ConfigurationError: a key or a value is wrong.
    """
    check(words)
    from mrlm_pl.cli.commands.fit import check_options

    logging.disable(logging.WARNING)  # the runs log it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_options("fit", words)
    finally:
        logging.disable(logging.NOTSET)


def _record(output: Path, words: Sequence[str], members: Sequence[Member]) -> None:
    """Write the options of the sweep and the settings of its folders, or check that those of earlier calls agree.

    A sweep without a finished run or a checkpoint is replaced.

    Raises:
        ConfigurationError: the options or settings differ, so that the report would mix runs, or the record is broken.
    """
    files = {str(path): path for member in members for path in config_files(member.words)}
    current: dict[str, Any] = {
        "options": list(words),
        "files": {name: path.read_text(encoding="utf-8") for name, path in files.items()},
        "settings": {member.cell.name: [list(pair) for pair in member.cell.settings] for member in members},
    }
    record = output / "sweep.json"
    try:
        before = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {**current, "settings": {}}
        both = [(before[key], current[key]) for key in ("files", "settings")]
        clash = any(name in old and old[name] != value for old, new in both for name, value in new.items())
        differs = before["options"] != current["options"] or clash
        begins = any(map(is_locked, (output / LOGS).glob("*.log")))
        if differs and (begins or any(_has_begun(output / name) for name in before["settings"])):
            raise ConfigurationError(
                f"output: {str(output)!r} holds a sweep with other options, another content of its configuration "
                "files or other settings under a folder's name; name another --output"
            )
        foreign = [str(output / name) for name in current["settings"] if name not in before["settings"]]
        if begun := [name for name in foreign if _has_begun(Path(name))]:
            raise ConfigurationError(f"output: {begun[0]!r} holds runs of no sweep; name another --output")
        merged = {} if differs else {key: {**before[key], **current[key]} for key in ("files", "settings")}
        write_json(record, {**current, **merged})
    except (ValueError, LookupError, TypeError) as error:
        remedy = "remove it, or name another --output"
        raise ConfigurationError(f"output: {str(record)!r} is not the record of a sweep; {remedy}") from error


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Wait for other processes that read or write the record and the report of a sweep, and let them wait."""
    with (output / LOGS / LOCK).open("a") as lock:
        while not try_lock(lock.fileno()):
            time.sleep(POLL_SECONDS)
        yield


def _has_begun(cell: Path) -> bool:
    """Return whether a run of a combination is finished, is trained now or has a checkpoint."""
    runs = list(cell.glob("seed-*"))
    return any(_state(run) in (FINISHED, "running") or any((run / "checkpoints").glob("*")) for run in runs)


def _state(folder: Path) -> str:
    """Return the state of a run; see :func:`mrlm_pl.runs.state.state_of`."""
    return "running" if in_training(folder) else state_in(folder)[0]


def _report(members: Sequence[Member], failed: Mapping[Member, str], options: argparse.Namespace) -> None:
    """Print the report on the finished runs, with a note on each other one, and write it to the sweep's folder."""
    states = {member: FAILED if member in failed else _state(member.folder) for member in members}
    finished = [str(member.folder) for member, state in states.items() if state == FINISHED]
    if not finished:
        return
    labels = {str(member.folder): member.cell.label for member in members if member.cell.label}
    *others, last = compare_metrics(find_runs(finished), options, labels)
    reasons = {FAILED: "failed", "running": "is still running"}
    notes = [
        f"{member.folder} is left out: it {reasons.get(state, 'is not finished')}."
        for member, state in states.items()
        if state != FINISHED
    ]
    comparisons = [*others, replace(last, notes=[*last.notes, *notes])]
    write(comparisons, [options.output / "report.md", options.output / "curves.csv"])


def _log(logs: Path, member: Member) -> Path:
    return logs / f"{'-'.join(member.folder.parts[-2:])}.log"


def _last_line(log: Path) -> str:
    """Return the last line of a log with text, at most 500 characters of it."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip()[:500] for line in reversed(lines) if line.strip()), "it has written nothing")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
