"""``mrlm eval`` and ``mrlm arena``: score runs and models on an environment, alone and against each other."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from jsonargparse import Namespace

from mrlm_pl.cli.parsing.environment_option import RunOptions, read_with_run
from mrlm_pl.cli.parsing.output import output_file
from mrlm_pl.cli.parsing.play_options import PLAY_OPTIONS, TASK_OPTIONS, arena_parser, eval_parser
from mrlm_pl.cli.parsing.run_configuration import same_settings
from mrlm_pl.durable_files import write_json
from mrlm_pl.engines.base import PolicySampling, Sampling
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError, counted, tell
from mrlm_pl.evaluation.arena import ArenaReport, Mean
from mrlm_pl.evaluation.comparison import Comparison, common_tasks, compare, read_report, rewards_differ
from mrlm_pl.evaluation.elo import Rating
from mrlm_pl.evaluation.report import EvaluationReport, interval_text
from mrlm_pl.evaluation.summary import evaluation_specs, task_identity
from mrlm_pl.policy import Policy
from mrlm_pl.runs.evaluation import arena
from mrlm_pl.runs.records.environment_code import code_of
from mrlm_pl.runs.seated_model import SeatedModel, sampling_from


def report_run(arguments: Sequence[str]) -> int:
    """Print and write the report; return exit status 1 if every episode failed, else 0.

    Raises:
        ConfigurationError: a mistake in the options, or the model cannot be used.
    """
    parser = eval_parser()
    run_options = read_with_run(parser, arguments)
    options = parser.instantiate(run_options.config)
    environment: Environment = options.environment
    name = run_options.name_of(environment)
    output = output_file(options.output)
    other = read_report(options.compare, name) if options.compare else None
    sampling = sampling_of(options, run_options.run.validation_sampling)
    if other is not None:
        settings = run_options.environment_settings()
        warn_of_other_settings("environment", settings, other.get("settings"), options.compare)
        warn_of_other_settings("sampling", asdict(sampling), other.get("sampling"), options.compare)
        other_code = other.get("code") or {}
        if changed := [
            module for module, digest in code_of(environment).items() if other_code.get(module, digest) != digest
        ]:
            tell(f"warning: {options.compare} was played with other code of {', '.join(changed)}; rewards may differ")
        task_options = {key: options[key] for key in TASK_OPTIONS}
        tasks = {task_identity(spec.task) for spec in evaluation_specs(environment, **task_options, name=name)}
        shared = len(common_tasks(tasks, {"environment": name, **task_options}, other))
        if 2 * shared < len(tasks):
            tell(
                f"warning: {options.compare} has only {shared} of the {len(tasks)} tasks of this evaluation; the "
                "comparison is of these alone"
            )
    report = evaluate_model(options.model, run_options, environment)
    written = report.to_dict()
    other_precision = None if other is None else other.get("precision", "32-true") or report.precision
    if other is not None and other_precision != report.precision:
        tell(
            f"warning: {options.compare} was generated in {other_precision}, and this evaluation in {report.precision}"
        )
    comparisons: dict[str, Comparison] = {}
    try:
        if other is not None and report.episodes:
            comparisons["comparison"] = comparison = compare(written, other)
            if comparison.own_measure != "mean reward" and (rewards_differ(written) or rewards_differ(other)):
                comparisons["reward_comparison"] = compare(written, other, rewards=True)
    finally:  # a report that cannot be compared is written and shown too
        try:
            if output is not None:  # first: the reader of the output may end
                write_json(output, written | {key: asdict(paired) for key, paired in comparisons.items()})
        finally:
            print(report)
    for paired in comparisons.values():
        source = f" (checkpoint of {other['checkpoint']})" if other and other.get("checkpoint") else ""
        print(_comparison_line(paired, len(written["tasks"]), f"{options.compare}{source}"))
    if output is not None:
        print(f"report in {output}; look at its episodes with `mrlm view {shlex.quote(str(output))}`")
    return 0 if report.episodes else 1


def evaluate_model(
    model: str, run_options: RunOptions, environment: Environment, policies: dict[str, Policy] | None = None
) -> EvaluationReport:
    """Return the report of a model on an environment.

    Args:
        model: name of the model.
        run_options: options, the model as its run records it, and the environment as a configuration file has it.
        environment: environment to play; it is closed at the end.
        policies: policies of the model in memory; those of this environment are added.

    Raises:
        ConfigurationError: the model cannot be used, or a number is wrong.
    """
    options = run_options.config
    name, recorded = run_options.name_of(environment), run_options.run
    seated = SeatedModel(model, environment, options.seats, name, precision=options.precision, recorded=recorded)
    seated.arguments = run_options.environment_settings()
    seated.serve(options.served_by)
    chosen = {key: options[key] for key in (*TASK_OPTIONS, "max_turns", "device")}
    return seated.evaluate(sampling=sampling_of(options, recorded.validation_sampling), loaded=policies, **chosen)


def arena_run(arguments: Sequence[str]) -> int:
    """Print and write the results of cross-play; return exit status 1 if every episode failed, else 0.

    Raises:
        ConfigurationError: a mistake in the options, or a model cannot be used.
    """
    parser = arena_parser()
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if not words:
        raise ConfigurationError("arena: name the players before the options, as in `mrlm arena NAME=MODEL NAME=MODEL`")
    players = {name: model for name, _, model in (word.partition("=") for word in words)}
    if len(players) < len(words) or not all(map(str.strip, (*players, *players.values()))):
        fault = "must be NAME=MODEL for each player, each with its own name"
        raise ConfigurationError(f"arena: {' '.join(words)!r} {fault}")
    models = ["--model", next(iter(players.values()))]
    run_options = read_with_run(parser, [*models, *arguments[len(words) :]])
    options = parser.instantiate(run_options.config)
    if options.seats or options.model not in models:
        raise ConfigurationError("seats, model: `mrlm arena` seats its players in every way; leave both out")
    output = output_file(options.output)
    report = arena(
        players,
        options.environment,
        sampling=sampling_of(options, run_options.run.validation_sampling),
        name=run_options.name_of(options.environment),
        max_seatings=options.max_seatings,
        **{key: options[key] for key in PLAY_OPTIONS if key != "seats"},
    )
    if output is not None:
        write_json(output, asdict(report))
    print(arena_table(report))
    return 0 if any(seating.episodes for seating in report.seatings) else 1


def arena_table(report: ArenaReport) -> str:
    """Return the tables of a report: rewards by seating, scores and differences between players, ratings."""
    lines = [f"{report.environment} ({report.split}, seed {report.seed})"]
    for seating in report.seatings:
        failed = f", {seating.failed} failed" if seating.failed else ""
        lines.append(f"\n{', '.join(f'{agent}: {player}' for agent, player in seating.players.items())}")
        lines.append(f"  {counted(seating.episodes, 'episode')}{failed}")
        lines += [f"  {agent} {mean.value:z.4f}{_interval(mean)}" for agent, mean in seating.rewards.items()]
    lines.append("")
    if report.differences and any(len(seating.players) > 1 for seating in report.seatings):
        reason = "All agents earn the same in every episode, as a team, so no player wins."
        lines.append(f"{reason} Whole teams of one player:")
    for pairing in report.scores:
        score = f"{pairing.score.value:z.4f}{_interval(pairing.score)}"
        lines.append(f"{pairing.player} against {pairing.other} {score}  {counted(pairing.games, 'game')}")
    for pair in report.differences:
        difference = f"{pair.difference.value:+z.4f}{_interval(pair.difference)}"
        lines.append(f"{pair.player} minus {pair.other} {difference}  {counted(pair.episodes, 'pair')} of episodes")
    lines.append("")
    for name, rating in report.ratings.items():
        interval = _interval(rating) if math.isfinite(rating.high) else ""
        lines.append(f"Elo {name} {round(rating.elo)}{'  the reference' if rating.low == rating.high else interval}")
    if any(math.isinf(rating.high) for rating in report.ratings.values()):
        lines.append("Elo has no intervals with several samples per task: they depend on each other.")
    return "\n".join(lines).rstrip()


def _interval(mean: Mean | Rating) -> str:
    return interval_text((mean.low, mean.high))


def sampling_of(options: Any, recorded: Mapping[str, Any]) -> Sampling:
    """Return the sampling: of the options, else of the run, else the default.

    Raises:
        ConfigurationError: a value is out of its range.
    """
    chosen = {setting.name: getattr(options, setting.name) for setting in fields(PolicySampling)}
    policies = options.policy_sampling.items()  # namespaces as long as the classes are not built
    chosen["policies"] = {
        name: vars(settings) if isinstance(settings, Namespace) else settings for name, settings in policies
    }
    return sampling_from(recorded, {name: value for name, value in chosen.items() if value is not None})


def warn_of_other_settings(kind: str, own: Mapping[str, Any], other: Mapping[str, Any] | None, path: str) -> None:
    """Warn on stderr if an evaluation to compare with was played with other settings.

    Args:
        kind: kind of the settings: ``environment`` or ``sampling``.
        own: settings of this evaluation.
        other: settings in the report at ``path``; None if it has none, as the report of a run.
    """
    if other is None:
        return
    own = json.loads(json.dumps(own, default=str))
    changed = [
        f"{name} is {json.dumps(own.get(name))} here and {json.dumps(other.get(name))} there"
        for name in sorted(own.keys() | other.keys())
        if not same_settings(own.get(name), other.get(name))
    ]
    if changed:
        tell(f"warning: {path} has other {kind} settings: {'; '.join(changed)}")


def _comparison_line(comparison: Comparison, tasks: int, path: str) -> str:
    shared = f"{comparison.tasks} of " if comparison.tasks < tasks else ""
    distinct = f" of {counted(comparison.problems, 'different problem')}"
    task_text = f"{shared}{counted(tasks, 'task')}{distinct if comparison.problems < comparison.tasks else ''}"
    own_measure, other_measure = comparison.own_measure, comparison.other_measure
    measure = f"in {own_measure}" if own_measure == other_measure else f"of {own_measure} against {other_measure}"
    return (
        f"paired gain {measure} {comparison.gain:+z.4f}{interval_text(comparison.ci95)} over {path}, in {task_text}: "
        f"{comparison.own_measure} {comparison.own:z.4f} ({_decisions(comparison.own_decisions)}) against "
        f"{comparison.other_measure} {comparison.other:z.4f} ({_decisions(comparison.other_decisions)})"
    )


def _decisions(number: float) -> str:
    return f"{number:g} decision{'' if number == 1 else 's'} per task"
