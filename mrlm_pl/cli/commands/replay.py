"""``mrlm replay``, ``mrlm rescore`` and ``mrlm whatif``: play the episodes of a run again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from mrlm_pl.cli.parsing.config_files import with_first_as
from mrlm_pl.cli.parsing.environment_option import RunOptions, read_with_run
from mrlm_pl.cli.parsing.output import output_file
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.cli.parsing.play_options import replay_parser, rescore_parser, whatif_parser
from mrlm_pl.durable_files import write_json
from mrlm_pl.errors import ConfigurationError, counted, tell
from mrlm_pl.evaluation.report import interval_text
from mrlm_pl.grouping import grouped
from mrlm_pl.runs.console import EpisodeProgress
from mrlm_pl.runs.plugins import class_path
from mrlm_pl.runs.records.replay import ReplayReport, RescoreReport, replay, rescore
from mrlm_pl.runs.records.run import recorded_iterations
from mrlm_pl.runs.records.whatif import whatif

SHOWN = 10
"""Number of episodes or decisions that are listed."""

WHATIF = ("agent", "turn", "message", "samples", "rest", "own_reward", "served_by", "device")
"""Options that are arguments of ``whatif``."""

Report = TypeVar("Report", ReplayReport, RescoreReport)


def replay_run(arguments: Sequence[str]) -> int:
    """Print the episodes that differ from their record; return exit status 0 if there is none, else 1.

    Raises:
        ConfigurationError: a mistake in the options, or there is no such run or episode.
        DataError: the episodes cannot be read.
    """
    report = _play_again(replay, replay_parser(), arguments)
    for id, differences in list(report.changed.items())[:SHOWN]:
        more = f" (and {counted(len(differences) - 1, 'more place')})" if len(differences) > 1 else ""
        print(f"{id} (recorded, replayed): {differences[0]}{more}")
    if len(report.changed) > SHOWN:
        print(f"... and {counted(len(report.changed) - SHOWN, 'more episode differs', 'more episodes differ')}")
    failed = f"; {report.failed} had failed: left out" if report.failed else ""
    played = report.equal + len(report.changed)
    equal = counted(played, "episode is equal to its record", "episodes are equal to their record")
    print(f"{report.equal} of {equal}{failed}")
    return 1 if report.changed else 0


def rescore_run(arguments: Sequence[str]) -> int:
    """Print the rewards of recorded episodes under other rewards; return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or there is no such run or episode.
        DataError: the episodes cannot be read, or one cannot be played again.
    """
    report = _play_again(rescore, rescore_parser(), arguments)
    gain_text = f"{report.new - report.old:+z.4f}{interval_text(report.ci95)}"
    print(f"reward {report.old:z.4f} -> {report.new:z.4f} ({gain_text}) over {counted(report.episodes, 'episode')}")
    for count, description in (
        (report.cut, "ended early: the environment asks for decisions that the record does not have"),
        (report.failed, "had failed: left out"),
    ):
        if count:
            tell(f"warning: {counted(count, 'episode')} {description}")
    for description, ids in (("a success now", report.gained), ("no success any more", report.lost)):
        if ids:
            more = f", and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
            print(f"{description}: {', '.join(ids[:SHOWN])}{more}")
    return 0


def whatif_run(arguments: Sequence[str]) -> int:
    """Print the value of a recorded decision and of others in its place; return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or there is no such run, episode or decision.
        DataError: the episodes cannot be read.
        RolloutError: the environment fails.
    """
    options, run_options = _options(whatif_parser(), arguments)
    if options.episode is None:
        raise ConfigurationError("--episode is missing; `mrlm view RUN` and RUN/episodes have the ids")
    output = output_file(options.output)
    report = whatif(
        options.model,
        options.environment,
        model=options.policies,
        name=run_options.name_of(options.environment),
        **{key: options[key] for key in (*WHATIF, "episodes", "episode")},
    )
    if output is not None:
        write_json(output, asdict(report))
    iterations = recorded_iterations(Path(options.model)) if options.policies is None else 0
    after = f", after {counted(iterations, 'iteration')}" if iterations else ""
    print(f"sampled with the policies of {options.policies or options.model}{after}")
    for kind, side in (("recorded", report.recorded), ("other", report.other)):
        print(f"{kind:<9} {side.mean:z8.4f}{interval_text(side.ci95)}")
        returns = grouped(zip(side.texts, side.returns, strict=True)).items()
        for text, values in sorted(returns, key=lambda item: -len(item[1]))[:SHOWN]:
            print(f"  {len(values):3d} x {sum(values) / len(values):z8.4f}  {text!r}")
    advantage = f"{report.advantage:+z.4f}{interval_text(report.ci95)}"
    print(f"advantage of the decision of {report.agent} at turn {report.turn}: {advantage}")
    if math.isinf(report.ci95[1]):
        print("all returns are equal: the decision makes no difference, or one too rare for these --samples")
    return 0


def _options(parser: CommandParser, arguments: Sequence[str]) -> tuple[Any, RunOptions]:
    missing = (
        f"RUN missing: the episodes are played in a run's environment; give it first, as in `{parser.prog} RUN`, or "
        f"name a model and an environment, as in `{parser.prog} builtin:tiny --environment math --episodes FILE`"
    )
    run_options = read_with_run(parser, with_first_as("--model", arguments), weights=False, without=missing)
    options = parser.instantiate(run_options.config)
    kind = class_path(type(options.environment))
    tell(f"playing again in {run_options.name_of(options.environment)}, {kind} ({run_options.shown_settings()})")
    return options, run_options


def _play_again(play: Callable[..., Report], parser: CommandParser, arguments: Sequence[str]) -> Report:
    """Return the report of a function on the chosen episodes of a run; write it to ``--output``."""
    options, run_options = _options(parser, arguments)
    output = output_file(options.output)
    chosen = {key: options[key] for key in ("episodes", "iteration", "episode")}
    with EpisodeProgress() as progress:
        name = run_options.name_of(options.environment)
        report = play(options.model, options.environment, name=name, progress=progress, **chosen)
    if output is not None:
        write_json(output, asdict(report))
    return report
