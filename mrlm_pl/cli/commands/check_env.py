"""``mrlm check-env``: check that an environment keeps the contract."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mrlm_pl.cli.parsing.config_files import with_first_as
from mrlm_pl.cli.parsing.configuration import merge_arguments
from mrlm_pl.cli.parsing.environment_option import read_with_run
from mrlm_pl.cli.parsing.output import output_file
from mrlm_pl.cli.parsing.play_options import check_env_parser
from mrlm_pl.durable_files import write_json
from mrlm_pl.environment import Environment
from mrlm_pl.environment.check import FEW_PROBLEMS, MOST_DRAWN, check_data, check_environment
from mrlm_pl.environment.rows import rows_or_faults
from mrlm_pl.environment.tasks import SPLITS
from mrlm_pl.episode_files import write_lines
from mrlm_pl.errors import ConfigurationError, counted, tell

SPLIT = "test"
"""Split of all rows of ``--data``."""


def run(arguments: Sequence[str]) -> int:
    """Print a line for each check; return exit status 0 if all pass, else 1.

    ``--level semantic`` also checks rewards and observations. With ``--data FILE`` play the reference
    solution of every row instead and print a line for each row that fails.

    Raises:
        ConfigurationError: a mistake in the options or in the environment's arguments.
        RemoteError: it is on a server that does not answer.
        DataError: its data cannot be read.
    """
    parser = check_env_parser()
    words = with_first_as("--environment", arguments)
    data = merge_arguments(words, ("data",))[0].get("data")
    if data is not None:
        words += ["--environment.data", json.dumps({SPLIT: data})]
    options = parser.instantiate(read_with_run(parser, words, weights=False, files=True).config)
    if options.environment is None:
        raise ConfigurationError("environment missing: name it, as in `mrlm check-env math`; `mrlm info` lists them")
    output = output_file(options.output, ".json" if data is None else ".jsonl")
    environment: Environment = options.environment
    if data is not None:
        if options.level != parser.get_default("level"):
            raise ConfigurationError(f"level: {options.level!r} is of checks, and --data plays its rows; leave out one")
        return _check_data(environment, data, output)

    _ = environment.agents  # a remote one is reached here; without an answer no check says more
    report = check_environment(environment, options.level)
    if output is not None:
        write_json(output, {"level": options.level, **report.as_json()})
    for result in report.checks:
        mark = "FAIL" if not result.passed else "ok  " if result.applies else "--  "
        print(f"{mark} {result.name}: {result.message}")
    print(f"{environment.name}: {report.summary}")
    if report.passed and (sizes := _sizes(environment)):
        print(f"{environment.name}: {sizes}")
    problem_counts = next((result.measures for result in report.checks if result.name == "splits are disjoint"), {})
    if few := [f"{count:g} in {split}" for split, count in problem_counts.items() if count < FEW_PROBLEMS]:
        tell(
            f"warning: {environment.name} has few different problems ({', '.join(few)}, in up to {MOST_DRAWN} tasks "
            "of a split): a score over them says little about others"
        )
    return 0 if report.passed else 1


def _sizes(environment: Environment) -> str:
    """Return the numbers of tasks by split; empty if all tasks are generated."""
    sizes = {split: environment.tasks(split).size for split in SPLITS}
    return ", ".join(f"{counted(size, 'task')} in {split}" for split, size in sizes.items() if size is not None)


def _check_data(environment: Environment, data: str, output: Path | None) -> int:
    report = check_data(environment, SPLIT)
    rows = list(rows_or_faults(data, SPLIT, ()))
    if output is not None:
        usable = set(report.usable)
        lines = [json.dumps(row) for number, row in rows if number in usable]
        write_lines(output, lines)
    for number, reason in report.failed.items():
        print(f"FAIL {data}, row {number}: {' '.join(reason.split())[:500]}")
    skipped = len(rows) - len(report.usable) - len(report.failed)
    earned = f", earning {min(report.rewards):g} to {max(report.rewards):g}" if report.rewards else ""
    print(
        f"{environment.name}: of {len(rows)} rows {len(report.solved)} are solved by their reference{earned}; "
        f"{len(report.failed)} are not, {len(report.without)} have none, {skipped} cannot be used"
    )
    if output is not None:
        print(f"{output}: the {len(lines)} usable rows")
    return 1 if report.failed or skipped else 0
