"""``mrlm replay`` and ``mrlm rescore``: play the episodes of a run again, without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jsonargparse.typing import NonNegativeInt

from mrlm_pl.cli.parsing.environment_option import RunOptions, environment_parser, read_with_run, shown_settings
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.durable_files import write_json
from mrlm_pl.evaluation.table import interval_text

SHOWN = 10
"""Episodes that are listed."""


def replay_run(arguments: Sequence[str]) -> int:
    """Print the episodes that differ from their record; return exit status 0 if there is none, else 1.

    Raises:
        ConfigurationError: a mistake in the options, or there is no such run or episode.
        DataError: the episodes cannot be read.
    """
    from mrlm_pl.runs import replay

    parser = record_parser("replay", "Play the episodes of a run again, and compare them with their record.")
    options, read = _options(parser, arguments)
    report = replay(options.model, options.environment, name=read.name_of(options.environment), **_chosen(options))
    for id, places in list(report.changed.items())[:SHOWN]:
        more = f" (and {len(places) - 1} more places)" if len(places) > 1 else ""
        print(f"{id} (recorded, replayed): {places[0]}{more}")
    if len(report.changed) > SHOWN:
        print(f"... and {len(report.changed) - SHOWN} more episodes that differ")
    failed = f"; {report.failed} had failed and were left out" if report.failed else ""
    played = report.equal + len(report.changed)
    print(f"{report.equal} of {played} episodes are equal to their record{failed}")
    if options.output:
        write_json(options.output, asdict(report))
    return 1 if report.changed else 0


def rescore_run(arguments: Sequence[str]) -> int:
    """Print the rewards of recorded episodes under other rewards; return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or there is no such run or episode.
        DataError: the episodes cannot be read, or one cannot be played again.
    """
    from mrlm_pl.runs import rescore

    text = "Play the episodes of a run again in an environment with other rewards, without generation."
    options, read = _options(record_parser("rescore", text), arguments)
    report = rescore(options.model, options.environment, name=read.name_of(options.environment), **_chosen(options))
    gain = f"{report.new - report.old:+.4f}{interval_text(report.ci95)}"
    print(f"reward {report.old:.4f} -> {report.new:.4f} ({gain}) over {report.episodes} episodes")
    for what, ids in (("a success now", report.gained), ("no success any more", report.lost)):
        if ids:
            more = f", and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
            print(f"{what}: {', '.join(ids[:SHOWN])}{more}")
    if options.output:
        write_json(options.output, asdict(report))
    return 0


def record_parser(command: str, text: str) -> CommandParser:
    """Return a parser of a command that reads the episodes of a run."""
    parser = environment_parser(command, text, required=False)
    parser.usage = f"mrlm {command} RUN [--environment NAME] [--environment.ARGUMENT VALUE ...] [options]"
    parser.add_argument("--model", type=str, required=True, help="Run folder; may be given as the first argument.")
    parser.add_argument("--episodes", type=str | None, help="File or folder of episodes; default RUN/episodes.")
    parser.add_argument("--iteration", type=NonNegativeInt | None, help="Only the episodes of this iteration.")
    parser.add_argument("--episode", type=str | None, help="Only the episode with this id.")
    parser.add_argument("--output", type=str | None, help="JSON file for the report.")
    return parser


def _options(parser: CommandParser, arguments: Sequence[str]) -> tuple[Any, RunOptions]:
    words = list(arguments)
    if words and not words[0].startswith("-"):
        words[:1] = ["--model", words[0]]
    read = read_with_run(parser, words, weights=False)
    options = parser.instantiate(read.config)
    print(
        f"mrlm: playing again in {read.name_of(options.environment)} ({shown_settings(read.config.environment)})",
        file=sys.stderr,
    )
    return options, read


def _chosen(options: Any) -> dict[str, Any]:
    return {key: options[key] for key in ("episodes", "iteration", "episode")}
