"""The improvement of one evaluation over another, task by task."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from mrlm_pl.errors import ConfigurationError, meant, nearest_path
from mrlm_pl.evaluation.intervals import mean_interval
from mrlm_pl.grouping import grouped


@dataclass(frozen=True)
class Comparison:
    """The improvement of one evaluation over another, on the tasks that both have.

    Args:
        gain: mean over the tasks of the first evaluation's result minus the second's.
        ci95: paired 95 % interval of the gain, for accuracies within [-1, 1]; tasks that pose the same problem are one
            cluster.
        tasks: number of tasks that both have.
        problems: number of different problems that these tasks pose.
        own: mean of the first evaluation over these tasks.
        own_measure: ``accuracy``, or ``majority@N`` for an evaluation with N samples of each task; ``mean reward`` for
            both if a task of one of them has no accuracy.
        own_decisions: number of decisions for each task in the first evaluation: the cost of its results.
        other: mean of the second evaluation over these tasks.
        other_measure: measure of the second evaluation; see ``own_measure``.
        other_decisions: number of decisions for each task in the second evaluation.
    """

    gain: float
    ci95: tuple[float, float]
    tasks: int
    problems: int
    own: float
    own_measure: str
    own_decisions: float
    other: float
    other_measure: str
    other_decisions: float


def compare(report: Mapping[str, Any], other: Mapping[str, Any], *, rewards: bool = False) -> Comparison:
    """Return the improvement of a report over another one; both as ``mrlm eval --output`` writes them.

    Args:
        report: report of the first evaluation.
        other: report of the second evaluation.
        rewards: compare the mean rewards even if all tasks have accuracies.

    Raises:
        ConfigurationError: they have no task in common.
    """
    fields = ["reward" if rewards else _common_field(side["tasks"]) for side in (report, other)]
    if "reward" in fields:
        fields = ["reward", "reward"]
    results, other_results = (_values(side["tasks"], name) for side, name in zip((report, other), fields, strict=True))
    common = common_tasks(results, report, other)
    differences = grouped((key[1], results[key] - other_results[key]) for key in common)
    bounds = (-math.inf, math.inf) if "reward" in fields else (-1.0, 1.0)
    return Comparison(
        gain=math.fsum(value for group in differences.values() for value in group) / len(common),
        ci95=mean_interval(list(differences.values()), *bounds),
        tasks=len(common),
        problems=len(differences),
        own=math.fsum(results[key] for key in common) / len(common),
        own_measure=_measure_name(report["tasks"], fields[0]),
        own_decisions=report["decisions_per_task"],
        other=math.fsum(other_results[key] for key in common) / len(common),
        other_measure=_measure_name(other["tasks"], fields[1]),
        other_decisions=other["decisions_per_task"],
    )


def common_tasks(
    tasks: Collection[tuple[str, str]], about: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """Return the tasks of an evaluation that a report has too.

    Args:
        tasks: tasks of the evaluation, perhaps not played yet; see :func:`~mrlm_pl.evaluation.summary.task_identity`.
        about: ``environment``, ``split`` and ``seed`` of the evaluation.
        other: report to compare with.

    Raises:
        ConfigurationError: they have no task in common.
    """
    where = f"{other['environment']!r} ({other['split']} split, seed {other.get('seed')})"
    if not other["tasks"]:
        raise ConfigurationError(f"the report of {where} has no episodes; compare with another one, or play it again")
    other_tasks = {(item["task"], item["problem"]) for item in other["tasks"]}
    if common := [task for task in tasks if task in other_tasks]:
        return common
    tasks_text, other_text = (
        f"{len(side_tasks)} of {side['environment']!r} ({side['split']} split, seed {side.get('seed')})"
        for side_tasks, side in ((tasks, about), (other_tasks, other))
    )
    remedy = "play both with the same environment, data, split and seed, and with `--num-episodes` of as many tasks"
    fault = f"the evaluations have no task in common: {tasks_text} and {other_text}"
    raise ConfigurationError(f"{fault}; {remedy} (tasks times --samples-per-task)")


def rewards_differ(report: Mapping[str, Any]) -> bool:
    """Return whether the mean reward of a task differs from its accuracy: whether a reward is neither 0 nor 1."""
    return any(item["reward"] != item["accuracy"] for item in report["tasks"])


def read_report(path: str | Path, environment: str | None = None) -> dict[str, Any]:
    """Return a report that ``mrlm eval --output`` wrote, or one of a run's ``evaluation_before.json``.

    Args:
        path: file of the report.
        environment: environment of the report in a run's file, which has one report for each; None takes the only one.

    Raises:
        ConfigurationError: the file cannot be read, or holds no such report.
    """
    if Path(path).is_dir():
        reports = _name_report(Path(path), "evaluation_[ab]*.json")
        raise ConfigurationError(f"{str(path)!r} is a folder, not a report{reports}")
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigurationError(f"there is no report {str(path)!r}; {meant(nearest_path(Path(path)))}") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"report {str(path)!r} cannot be read: {error}") from error
    if not _is_report(data) and isinstance(data, dict) and data and all(map(_is_report, data.values())):
        if environment not in data and (environment is not None or len(data) > 1):
            known = f"choose from {', '.join(data)}"
            raise ConfigurationError(f"report {str(path)!r} has no environment {environment!r}; {known}")
        data = data[environment] if environment in data else next(iter(data.values()))
    if isinstance(data, dict) and "scores" in data:
        cells = _name_report(Path(path).with_suffix(""), "*.json")
        raise ConfigurationError(f"{str(path)!r} is a table, not a report of one model and environment{cells}")
    if not _is_report(data):
        remedy = "write it again with this version"
        raise ConfigurationError(f"{str(path)!r} is not a report of `mrlm eval --output` or of a run; {remedy}")
    return data


def _name_report(folder: Path, pattern: str) -> str:
    """Return the advice to name one of the reports in a folder."""
    paths = sorted(map(str, folder.glob(pattern))) or ["a file of `mrlm eval --output`"]
    return f"; name {' or '.join(paths)}"


class _Result(TypedDict):
    task: str
    problem: str
    episodes: int
    reward: float | None
    accuracy: float | bool | None
    majority: float | bool | None


class _Report(TypedDict):
    environment: str
    split: str
    tasks: list[_Result]
    decisions_per_task: Any


def _is_report(data: Any) -> bool:
    try:
        msgspec.convert(data, _Report)
    except msgspec.ValidationError:
        return False
    return True


def _common_field(tasks: Sequence[Mapping[str, Any]]) -> str:
    """Return the result that every task of a report has: ``majority``, else ``accuracy``, else ``reward``."""
    judged = ("majority", "accuracy")
    return next((name for name in judged if all(item[name] is not None for item in tasks)), "reward")


def _values(tasks: Sequence[Mapping[str, Any]], field: str) -> dict[tuple[str, str], float]:
    return {(item["task"], item["problem"]): float(item[field]) for item in tasks}


def _measure_name(tasks: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return the name of a result; a majority has its number of samples."""
    if field != "majority":
        return "mean reward" if field == "reward" else field
    samples = [item["episodes"] for item in tasks]
    least, most = min(samples), max(samples)
    return f"majority@{least}" if least == most else f"majority@{least}-{most}"
