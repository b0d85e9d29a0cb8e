"""Scores of models on environments as a table and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError

Bounds = tuple[float | None, float | None]


@dataclass(frozen=True)
class Score:
    """The result of a model on an environment: an evaluation report without its tasks and transcripts.

    Args:
        model: name of the model.
        environment: name of the environment.
        episodes: number of episodes without an infrastructure error.
        failed: number of episodes that an infrastructure error ended.
        mean_reward: mean over the episodes; None without any.
        ci95: 95 % interval of ``mean_reward``; its bounds are None if no spread is known.
        accuracy: fraction of successes; None if the environment does not judge.
        accuracy_ci95: 95 % interval of ``accuracy``.
        pass_at_k: chance that one of k samples of a task succeeds, by k; empty without an accuracy.
        majority_at_k: frequency with which the majority of k samples is right, by k; empty without votes.
        checkpoint: iteration or update of a run that had not finished; see
            :class:`~mrlm_pl.evaluation.report.EvaluationReport`.
        report: file of the whole report; None if there is none.
        error: reason for a missing result; None if there is a result.
    """

    model: str
    environment: str
    episodes: int = 0
    failed: int = 0
    mean_reward: float | None = None
    ci95: Bounds | None = None
    accuracy: float | None = None
    accuracy_ci95: Bounds | None = None
    pass_at_k: Mapping[str, float] = field(default_factory=dict)
    majority_at_k: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    report: str | None = None
    error: str | None = None

    def of(self, measure: str) -> tuple[float | None, tuple[float, float] | None]:
        """Return ``accuracy`` or ``mean_reward`` with its interval, None where it is unknown."""
        value, bounds = (self.accuracy, self.accuracy_ci95) if measure == "accuracy" else (self.mean_reward, self.ci95)
        low, high = bounds or (None, None)
        return value, None if low is None or high is None else (low, high)


def score_of(model: str, environment: str, report: Mapping[str, Any], file: str | None) -> Score:
    """Return the score in a report, as :meth:`EvaluationReport.to_dict` has it."""
    values = {item.name: report[item.name] for item in fields(Score) if item.name in report}
    error = None
    if not report["episodes"]:
        error = f"the split {report['split']} has no tasks"
        if report["transcripts"]:
            error = f"every episode failed, {report['failed']} in all; the first: {report['transcripts'][0]['error']}"
    return Score(**{**values, "model": model, "environment": environment, "report": file, "error": error})


def measures(scores: Sequence[Score]) -> dict[str, str]:
    """Return the measure of each environment: ``accuracy`` if all of its scores have one, else ``mean_reward``.

    >>> measures([Score("a", "math", accuracy=0.5), Score("b", "math", error="no room"), Score("a", "halves")])
    {'math': 'accuracy', 'halves': 'mean_reward'}
    """
    by_environment = dict.fromkeys((score.environment for score in scores), "accuracy")
    for score in scores:
        if score.error is None and score.accuracy is None:
            by_environment[score.environment] = "mean_reward"
    return by_environment


def table(scores: Sequence[Score]) -> Table:
    """Return a row for each model and a column for each environment, with 95 % intervals."""
    columns = measures(scores)
    heads = ["model", *(f"{escape(name)}\n{measure.replace('_', ' ')}" for name, measure in columns.items())]
    result = Table(*(Column(head, overflow="fold") for head in heads))
    for model in dict.fromkeys(score.model for score in scores):
        by_environment = {score.environment: score for score in scores if score.model == model}
        cells = (
            _cell(by_environment[name], measure) if name in by_environment else "-" for name, measure in columns.items()
        )
        result.add_row(escape(model), *cells)
    return result


def _cell(score: Score, measure: str) -> str:
    value, bounds = score.of(measure)
    if value is None:
        return "failed"
    lines = [f"{value:z.4f}", *([f"\\[{bounds[0]:z.4f}, {bounds[1]:z.4f}]"] if bounds else [])]
    for name, values in (("pass", score.pass_at_k), ("majority", score.majority_at_k)):
        if (samples := max(map(int, values), default=1)) > 1:
            lines.append(f"{name}@{samples} {values[str(samples)]:z.4f}")
    return "\n".join([*lines, *([f"{score.failed} failed"] if score.failed else [])])


def new_figure(path: Path, width: float, height: float) -> Any:
    """Return a figure of matplotlib, of this size in inches, for a picture.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "install it with `pip install 'mrlm[plot]'`"
        raise ConfigurationError(f"{str(path)!r} needs matplotlib; {remedy}") from error
    return Figure(figsize=(width, height), layout="constrained")


def plot(scores: Sequence[Score], path: Path) -> None:
    """Write the scores as a picture: a group for each environment, in it a point with its interval for each model.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    columns = measures(scores)
    models = list(dict.fromkeys(score.model for score in scores))
    figure = new_figure(path, max(5.0, 1.6 * len(columns) + 2), 4.5)
    axes = figure.subplots()
    for row, model in enumerate(models):
        positions, values, errors = list[float](), list[float](), list[tuple[float, float]]()
        for score in scores:
            value, bounds = score.of(columns[score.environment])
            if score.model != model or value is None:
                continue
            positions.append(list(columns).index(score.environment) + 0.6 * ((row + 0.5) / len(models) - 0.5))
            values.append(value)
            low, high = bounds or (math.nan, math.nan)
            # Rounding may leave a bound on the wrong side of the value, which matplotlib rejects.
            errors.append((max(value - low, 0.0), max(high - value, 0.0)))
        axes.errorbar(positions, values, yerr=list(zip(*errors, strict=True)) or None, fmt="o", capsize=3, label=model)
    labels = [f"{name}\n{measure.replace('_', ' ')}" for name, measure in columns.items()]
    axes.set_xticks(range(len(columns)), labels)
    axes.set(ylabel="mean, 95 % interval", xlim=(-0.5, len(columns) - 0.5))
    axes.legend()
    with replacing(os.path.realpath(path)) as draft:
        figure.savefig(draft, format=path.suffix[1:])
