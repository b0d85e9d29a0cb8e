"""``mrlm eval`` of several models or environments: a table with intervals, a report for each cell, and a picture."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jsonargparse import get_loader
from rich.console import Console

from mrlm_pl.cli.commands.evaluate import evaluate_model, report_run, sampling_of
from mrlm_pl.cli.parsing.config_files import unknown_key, with_first_as
from mrlm_pl.cli.parsing.configuration import ARGUMENTS, CLASS, load_value, merge_arguments
from mrlm_pl.cli.parsing.environment_option import RunOptions, environment_config, read, read_with_run
from mrlm_pl.cli.parsing.output import output_file
from mrlm_pl.cli.parsing.play_options import TASK_OPTIONS, eval_parser
from mrlm_pl.durable_files import write_json
from mrlm_pl.engines.base import Precision
from mrlm_pl.errors import DEBUG_VARIABLE, ConfigurationError, MRLMError, counted, did_you_mean, tell, writing
from mrlm_pl.evaluation.comparison import read_report
from mrlm_pl.evaluation.report import interval_text
from mrlm_pl.evaluation.score_table import Score, measures, plot, score_of, table
from mrlm_pl.evaluation.summary import check_samples
from mrlm_pl.learner.policies.seats import check_seats
from mrlm_pl.policy import BUILTIN_TINY, Policy
from mrlm_pl.runs.plugins import find_environment
from mrlm_pl.runs.records.run import RecordedRun, checkpoints_of, read_run
from mrlm_pl.runs.seated_model import check_served, generation_precision

SCHEMA = 1
"""Version of the file of a table."""

NARROWEST = 160
"""Columns of the table where the output is not a terminal."""


@dataclass(frozen=True)
class Column:
    """An environment of the table, with the same settings for all models.

    Args:
        name: heading of the column.
        run_options: options of the command, with the environment, its name in runs and in its tasks, and the first run.
        models: names of the models that play it.
    """

    name: str
    run_options: RunOptions
    models: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A model on an environment of the table.

    Args:
        model: name of the model.
        column: name of the environment.
        run_options: options with the environment, and the run or model of that name.
        output: file of the table; None writes no files and no reports.
        weights: function that returns the files of the model's weights, read once for all of its cells; see
            :func:`_weight_files`.
    """

    model: str
    column: str
    run_options: RunOptions
    output: Path | None
    weights: Callable[[], Mapping[str, Any]]

    @property
    def file(self) -> Path | None:
        """The file of the report, in a folder next to the table."""
        name = re.sub(r"[^\w.=-]+", "-", f"{self.model}--{self.column}").strip("-.")
        return None if self.output is None else self.output.with_suffix("") / f"{name[-200:]}.json"

    @property
    def precision(self) -> Precision:
        """The precision of generation."""
        options = self.run_options.config
        return generation_precision(self.run_options.run, options.precision, options.device)

    def score(self, policies: dict[str, Policy]) -> Score:
        """Return the score: of the file if it was finished with the same options, else of episodes played now.

        Args:
            policies: policies of the model in memory; those of this cell are added.
        """
        try:
            report = self._report(policies)
        except Exception as error:  # an environment and a model may fail in any way; the other cells are kept
            if DEBUG_VARIABLE in os.environ:
                traceback.print_exception(error)
            kind = "" if isinstance(error, MRLMError) else f"{type(error).__name__}: "
            return Score(self.model, self.column, error=" ".join(f"{kind}{error}".split()))
        file = None if self.file is None else f"{self.file.parent.name}/{self.file.name}"
        return score_of(self.model, self.column, report, file)

    def _report(self, policies: dict[str, Policy]) -> Mapping[str, Any]:
        run = self.run_options.run
        options = self.run_options.config
        request: dict[str, Any] = {
            **{name: options[name] for name in TASK_OPTIONS},
            "max_turns": options.max_turns or run.turn_limit(self.run_options.name or ""),
            "seats": {**run.seats, **options.seats},
            "environment": self.run_options.played,
            "served_by": options.served_by,
            "sampling": asdict(sampling_of(options, run.validation_sampling)),
            "model": self.model,
            "policies": run.policies,
            "weights": self.weights(),
        }
        if (precision := self.precision) != "32-true":
            request["precision"] = precision
        request = json.loads(json.dumps(request, default=str))
        if self.file is not None and (finished := _finished_report(self.file, request)):
            print(f"mrlm: {self.file} is kept; remove it to play its episodes again")
            return finished
        with closing(eval_parser().instantiate(options).environment) as environment:
            config = options.clone()
            seats = options.seats.items()
            config.seats = {agent: own for agent, own in seats if agent in environment.agents and own in run.policies}
            report = evaluate_model(self.model, replace(self.run_options, config=config), environment, policies)
        written = {**report.to_dict(), "asked": request}
        if self.file is not None:
            write_json(self.file, written)
        return written


def eval_run(arguments: Sequence[str]) -> int:
    """Evaluate, with a table if several models or environments are given; return the exit status.

    Raises:
        ConfigurationError: see :func:`mrlm_pl.cli.commands.evaluate.report_run` and :func:`table_run`.
    """
    words = with_first_as("--model", arguments)
    lists = [*_join_values(words)]
    config, others = merge_arguments(lists, ("model", "environment"), get_loader("yaml"))
    several = any(isinstance(config.get(name), list) for name in ("model", "environment"))
    return table_run(config, others) if several else report_run(words)


def _join_values(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments, several values of ``--model`` and ``--environment`` as a list.

    >>> [*_join_values(["--model", "a", "b", "-n", "3", "--environment", "math"])]
    ['--model=["a", "b"]', '-n', '3', '--environment', 'math']
    """
    words = [*arguments]
    while words:
        option = words.pop(0)
        values = [*itertools.takewhile(lambda word: not word.startswith("-"), words)]
        if option in ("--model", "--environment") and len(values) > 1:
            del words[: len(values)]
            yield f"{option}={json.dumps([load_value(value, get_loader('yaml')) for value in values])}"
        else:
            yield option


def table_run(config: Mapping[str, Any], words: Sequence[str]) -> int:
    """Play all cells, print the table and write its files; return exit status 1 if a cell failed, else 0.

    Args:
        config: configuration of the files, with the models as ``model`` and the environments as ``environment``, one or
            a list of each.
        words: other options.

    Raises:
        ConfigurationError: a mistake in the options, there is no such model, or two columns have the same name.
    """
    models = tuple(map(str, _as_list(config.get("model"))))
    if not models:
        raise ConfigurationError("model missing; give it as `--model MODEL [MODEL ...]`")
    if len(set(models)) < len(models):
        raise ConfigurationError(f"model: {', '.join(models)} has the same model twice; name each once")
    runs = {model: read_run(model) for model in models}
    # The line break tells the parser that this is not a path.
    others = {name: value for name, value in config.items() if name not in ("model", "environment")}
    words = [f"--config={json.dumps(others, indent=1)}", *words] if others else list(words)
    entries = _as_list(config.get("environment"))
    columns = list(_named_columns(runs, entries, words) if entries else _recorded_columns(runs, words))
    options = columns[0].run_options.config
    check_samples(options.num_episodes, options.samples_per_task)
    all_policies = {name for run in runs.values() for name in run.policies}
    for model, run in runs.items():  # the only policy of a model needs no seat
        check_seats(options.seats, run.policies if len(run.policies) > 1 else all_policies, f"{model}: ")
        check_served(options.served_by, run.policies, model)
        sampling_of(options, run.validation_sampling).check_policies(run.policies, "sampling")
    _check_agents(options.seats, columns)
    if options.compare is not None:
        raise ConfigurationError("compare: it takes one model and one environment; leave out the others")
    output = output_file(options.output)
    weights = {model: functools.cache(functools.partial(_weight_files, run)) for model, run in runs.items()}
    cells = [
        Cell(model, column.name, replace(column.run_options, run=runs[model]), output, weights[model])
        for model in models
        for column in columns
        if model in column.models
    ]
    if output is not None:
        if len({cell.file for cell in cells}) < len(cells):
            remedy = "give the columns other names, or each of the models its own table"
            raise ConfigurationError(f"output: two cells of the table have the same file; {remedy}")
        folder = output.with_suffix("")
        with writing("output", folder):
            folder.mkdir(parents=True, exist_ok=True)
    loaded_policies: dict[str, Policy] = {}
    scores: list[Score] = []
    for number, cell in enumerate(cells, start=1):
        if scores and scores[-1].model != cell.model:
            loaded_policies.clear()
            gc.collect()  # engines and models refer to each other, and two models may not fit side by side
        scores.append(cell.score(loaded_policies))
        print(f"mrlm: {number} of {len(cells)}: {_score_line(scores[-1])}", flush=True)
    written = _write_table(output, columns, scores) if output is not None else None
    console = Console()
    console = console if console.is_terminal else Console(width=NARROWEST)
    console.print(table(scores))
    episodes = counted(options.num_episodes, "episode")
    print(f"{options.split} split, seed {options.seed}, {episodes}; 95 % intervals in brackets")
    for column in columns:
        print(f"{column.name}: {column.run_options.shown_settings()}")
    precisions = {cell.model: cell.precision for cell in cells}
    if len(set(precisions.values())) > 1:
        print("generated in " + ", ".join(f"{precision} ({model})" for model, precision in precisions.items()))
    else:
        print(f"generated in {cells[0].precision}")
    for model, checkpoint in dict.fromkeys((score.model, score.checkpoint) for score in scores if score.checkpoint):
        print(f"{model}: checkpoint of {checkpoint}")
    if written is not None:
        print(written)
    failed = [score for score in scores if score.error is not None]
    for score in failed:
        tell(f"{score.model} on {score.environment} failed: {score.error}")
    return 1 if failed else 0


def _check_agents(seats: Mapping[str, str], columns: Sequence[Column]) -> None:
    """Validate that each seat is of an agent of some environment, if all of them can be made.

    Raises:
        ConfigurationError: a seat is of no agent.
    """
    agents: list[str] = []
    for column in columns if seats else ():
        try:
            with closing(eval_parser().instantiate(column.run_options.config).environment) as environment:
                agents += environment.agents
        except Exception:  # as in Cell.score, whose cells name it
            return
    for agent in seats:
        if agent not in agents:
            hint = did_you_mean(agent, agents, f"the agents are {', '.join(dict.fromkeys(agents))}")
            raise ConfigurationError(f"seats: no environment of the table has an agent {agent!r}; {hint}")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _named_columns(runs: Mapping[str, RecordedRun], entries: Sequence[Any], words: Sequence[str]) -> Iterator[Column]:
    """Yield a column for each environment that is named, with the settings of the first run that has it."""
    seen = set[str]()
    for entry in entries:
        environment = dict(entry) if isinstance(entry, Mapping) else {CLASS: entry}
        name = environment.pop("name", None)
        if not isinstance(environment.get(CLASS), str) or not isinstance(name, str | None):
            remedy = "give a name, or `{class_path: NAME, init_args: {...}}`"
            raise ConfigurationError(f"environment: {entry!r} has no text as class or name; {remedy}")
        if unknown := [key for key in environment if key not in (CLASS, ARGUMENTS)]:
            allowed = ("name", CLASS, ARGUMENTS)
            raise ConfigurationError(f"environment: {entry!r}: {unknown_key('an environment', unknown[0], allowed)}")
        owner = next(
            (model for model, run in runs.items() if run.matching_environments(environment[CLASS])), next(iter(runs))
        )
        named = environment[CLASS] if set(environment) == {CLASS} else json.dumps(environment)
        run_options = read_with_run(eval_parser(), [*words, "--model", owner, "--environment", named])
        name = name or run_options.name or find_environment(run_options.played[CLASS]).name
        if name in seen:
            remedy = f"name one, as in `{{name: hard, class_path: {name}, ...}}`"
            raise ConfigurationError(f"environment: two are named {name!r}; {remedy}")
        seen.add(name)
        yield Column(name, replace(run_options, name=name), tuple(runs))


def _recorded_columns(runs: Mapping[str, RecordedRun], words: Sequence[str]) -> Iterator[Column]:
    """Yield a column for each environment of the runs; a run plays its own, a model that is not a run plays all.

    Raises:
        ConfigurationError: no model is a run with an environment, or one would run a program.
    """
    parser = eval_parser()
    columns: dict[str, Column] = {}
    for model, run in runs.items():
        for recorded in run.environments:
            recorded.check_unnamed(model)
            options = read(parser, [*words, "--model", model, f"--environment={json.dumps(recorded.config)}"])
            config = environment_config(parser, options)
            name = recorded_name = recorded.name or find_environment(config[CLASS]).name
            if name in columns and columns[name].run_options.played != config:
                name = f"{name} of {model}"
            column = columns.setdefault(name, Column(name, RunOptions(options, run, recorded_name, config), ()))
            columns[name] = replace(column, models=(*column.models, model))
    if not columns:
        raise ConfigurationError(f"environment missing, and {', '.join(runs)} have none; give `--environment NAME`")
    plain = tuple(model for model, run in runs.items() if not run.environments)
    yield from (replace(column, models=(*column.models, *plain)) for column in columns.values())


def _finished_report(file: Path, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the report in a file if all of its episodes were played and asked for alike, else None."""
    if not file.is_file():
        return None
    report = read_report(file)
    return report if report.get("asked") == request and report["episodes"] and not report["failed"] else None


def _weight_files(run: RecordedRun) -> dict[str, dict[str, tuple[int, int]]]:
    """Return size and time of each file of each policy's folder, or of its checkpoint; none for a model on the hub.

    Raises:
        PolicyError: a checkpoint cannot be read.
    """
    files: dict[str, dict[str, tuple[int, int]]] = {}
    for name, settings in run.policies.items():
        if checkpoints := checkpoints_of([settings]):
            files[name] = {str(checkpoint): checkpoint.written for checkpoint in checkpoints}
            continue
        folder = Path(settings.get("model", BUILTIN_TINY)).expanduser()
        files[name] = {
            path.relative_to(folder).as_posix(): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted((folder, *folder.rglob("*")))
            if path.is_file()
        }
    return files


def _score_line(score: Score) -> str:
    (measure,) = measures([score]).values()
    value, bounds = score.of(measure)
    if score.error is not None or value is None:
        return f"{score.model} on {score.environment} failed"
    return f"{score.model} on {score.environment}: {measure.replace('_', ' ')} {value:z.4f}{interval_text(bounds)}"


def _write_table(output: Path, columns: Sequence[Column], scores: Sequence[Score]) -> str:
    """Write the table and its picture, without which all else is kept; return where they are."""
    options = columns[0].run_options.config
    write_json(
        output,
        {
            "schema": SCHEMA,
            **{name: options[name] for name in ("split", "seed", "num_episodes", "samples_per_task")},
            "environments": {column.name: dict(column.run_options.played) for column in columns},
            "scores": [asdict(score) for score in scores],
        },
    )
    picture = output.with_suffix(".png")
    text = f"table in {output}, reports of the cells in {output.with_suffix('')}/"
    try:
        plot(scores, picture)
        return f"{text}, picture in {picture}"
    except ConfigurationError as error:
        return f"{text}; no picture: {error}"
