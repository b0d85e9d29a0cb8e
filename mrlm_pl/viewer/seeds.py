"""Runs with equal settings: a metric as the mean over their seeds, with 95 % intervals and paired differences.

:func:`compare_seeds` reads the metric of each run over its cost (:func:`_metric_values`), gathers the runs that differ
in their seed alone, and interpolates all of them at equal costs. A :class:`SeedComparison` then
estimates means over seeds, and shows them as a table, a file or a picture.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError, counted, did_you_mean
from mrlm_pl.evaluation.intervals import difference_interval, mean_interval
from mrlm_pl.evaluation.score_table import new_figure
from mrlm_pl.grouping import distinct_tails, grouped
from mrlm_pl.viewer.runs import Run
from mrlm_pl.viewer.text import number_text

AXES = {
    "episodes": "progress/episodes",
    "decisions": "progress/decisions",
    "tokens": "progress/generated_tokens",
    "iterations": "progress/iteration",
    "updates": "step",
    "seconds": "progress/seconds",
}
"""Costs at which runs may be compared, and the column of the metrics that counts each."""

POINTS = 100
"""Number of points of a curve."""

LAST = POINTS // 10
SHORT = 0.9
"""A run that ends before this share of the longest one's cost is named in a note."""

LATE = 0.5
"""A run whose first value is beyond this share of the common cost is named in a note."""

TASKS = re.compile(r"data\.(environment|weights|curriculum)\b")
"""Settings that decide which tasks are played."""

LABELED = 4
"""Settings in a label; runs that differ in more are named by their folders."""

Estimate = tuple[float, tuple[float, float]]
"""A mean and its 95 % interval; infinite bounds where it is unknown, as with one seed."""


@dataclass(frozen=True)
class Family:
    """Runs that differ in their seed alone.

    Args:
        label: settings in which the family differs from the others.
        curves: metric at the points of the comparison, by seed; for runs without a seed by their name.
        steps: metric in the middle of the step before each point, for means over costs, by seed.
        last: last value that each run logged, by seed; at its own end, perhaps beyond the comparison.
    """

    label: str
    curves: Mapping[Any, np.ndarray]
    steps: Mapping[Any, np.ndarray]
    last: Mapping[Any, float]

    def means(self, steps: slice | None) -> Mapping[Any, float]:
        """Return each seed's mean over some of the steps, or its last value for None."""
        return self.last if steps is None else {seed: float(curve[steps].mean()) for seed, curve in self.steps.items()}

    def estimate(self, steps: slice | None) -> Estimate:
        """Return the mean over the seeds of their :meth:`means`."""
        return _estimate(list(self.means(steps).values()))

    def points(self) -> list[Estimate]:
        """Return the mean over the seeds at each point."""
        return [_estimate([*values]) for values in zip(*self.curves.values(), strict=True)]


@dataclass(frozen=True)
class SeedComparison:
    """Families of runs at equal cost.

    Args:
        metric: compared column of ``metrics.csv``.
        axis: name of the cost, a key of :data:`AXES`.
        points: costs at which all runs are compared; the last one is the largest that all have reached.
        families: families in the order of their runs.
        notes: warning about families with different tasks, and the runs that are left out, with the reason.
    """

    metric: str
    axis: str
    points: np.ndarray
    families: Sequence[Family]
    notes: Sequence[str]

    def difference(self, family: Family, steps: slice | None) -> tuple[Estimate, Sequence[Any]]:
        """Return the excess of a family over the first one, and the seeds that are paired.

        No seeds are paired if the two share none, or only one of several: one pair has no interval.
        """
        means, first_means = family.means(steps), self.families[0].means(steps)
        seeds = [seed for seed in means if seed in first_means]
        if len(seeds) > 1 or len(seeds) == len(means) == len(first_means):
            return _estimate([means[seed] - first_means[seed] for seed in seeds]), seeds
        estimate, first_estimate = family.estimate(steps), self.families[0].estimate(steps)
        return (estimate[0] - first_estimate[0], difference_interval(estimate, first_estimate)), ()

    def markdown(self) -> str:
        """Return the comparison as a table.

        Evaluations before and after training are no curve, so only the last one counts.
        """
        cost = f"{self.points[-1]:,.0f} {self.axis}"
        columns = {f"last tenth of {cost}": slice(-LAST, None), "mean over all": slice(None)}
        means = {**({} if self.metric.startswith("held_out/") else columns), "last value of each run": None}
        header, rows = ["runs", "seeds", *means], []
        for family in self.families:
            rows.append([family.label, str(len(family.curves)), *map(_text, map(family.estimate, means.values()))])
        if len(rows) > 1:
            steps = next(iter(means.values()))
            header.append(f"last {'value' if steps is None else 'tenth'} minus the first row's")
            for family, row in zip(self.families, rows, strict=True):
                difference, seeds = self.difference(family, steps)
                row.append("" if family is self.families[0] else f"{_text(difference)}, {self._pairs(family, seeds)}")
        escaped = partial(re.sub, r"[\\|<*`]|(?<![^\W_])_", r"\\\g<0>")  # characters of Markdown
        lines = (f"| {' | '.join(map(escaped, line))} |" for line in [header, ["---"] * len(header), *rows])
        notes = "".join(f"\n- {note}" for note in self.notes)
        return "\n".join(lines) + f"\n\nMeans of `{self.metric}` over seeds with 95 % intervals (Student's t).{notes}\n"

    def _pairs(self, family: Family, seeds: Sequence[Any]) -> str:
        """Return the number of paired seeds, and their names if a family has others too."""
        if not seeds:
            return "seeds not paired"
        complete = len(seeds) == len(family.curves) == len(self.families[0].curves)
        names = "" if complete else f" ({', '.join(map(str, seeds))})"
        return f"{counted(len(seeds), 'pair')} of seeds{names}"

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the curves: metric, runs, seeds, cost, mean, and the bounds of its interval, for a file."""
        for family in self.families:
            for point, (mean, bounds) in zip(self.points, family.points(), strict=True):
                finite_bounds = [bound if math.isfinite(bound) else "" for bound in bounds]
                yield self.metric, family.label, len(family.curves), float(point), mean, *finite_bounds

    def draw(self, axes: Any) -> None:
        """Draw the curves: means with bands, and a thin line for each seed."""
        for family in self.families:
            estimates = family.points()
            (line,) = axes.plot(
                self.points, [mean for mean, _ in estimates], label=f"{family.label} ({len(family.curves)})"
            )
            low, high = np.array([interval for _, interval in estimates]).T
            finite = np.isfinite(low) & np.isfinite(high)
            axes.fill_between(self.points, low, high, where=finite, color=line.get_color(), alpha=0.2)
            for curve in family.curves.values():
                axes.plot(self.points, curve, color=line.get_color(), alpha=0.3, linewidth=0.7)
        axes.set(xlabel=self.axis, ylabel=self.metric)
        axes.legend(title="runs (seeds)")


def csv_text(comparisons: Sequence[SeedComparison]) -> str:
    """Return the curves of comparisons at one cost, a row for each metric, family and point."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["metric", "runs", "seeds", comparisons[0].axis, "mean", "low", "high"])
    writer.writerows(row for comparison in comparisons for row in comparison.rows())
    return text.getvalue()


def plot(comparisons: Sequence[SeedComparison], path: Path) -> None:
    """Write the curves of comparisons as a picture, one below the other.

    Raises:
        ConfigurationError: matplotlib is missing.
    """
    figure = new_figure(path, 8, 5 * len(comparisons))
    for comparison, axes in zip(comparisons, figure.subplots(len(comparisons), squeeze=False).flat, strict=True):
        comparison.draw(axes)
    with replacing(os.path.realpath(path)) as draft:
        figure.savefig(draft, format=path.suffix[1:])


def compare_seeds(
    runs: Mapping[str, Run],
    metric: str = "rollout/reward",
    axis: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> SeedComparison:
    """Return a metric of runs at equal cost, by families of runs that differ in their seed alone.

    The costs are ``POINTS`` equal steps up to the largest one that all runs have reached; between two logged rows a
    metric is interpolated linearly, and the first value stands for all costs before it. Among runs with equal settings
    and seeds, such as a run and its resumed copy, the longest one counts.

    Args:
        runs: runs by name.
        metric: column of ``metrics.csv``, or one of :meth:`~mrlm_pl.viewer.runs.Run.curves`.
        axis: cost, a key of :data:`AXES`; None is the first one at which a run has the metric.
        labels: labels of runs by name, for the families that they begin; None names families by the settings that
            differ.

    Raises:
        ConfigurationError: no run has the metric.
    """
    curves = {name: run.curves(from_start=True) for name, run in runs.items()}
    by_axis = {cost: {name: _metric_values(columns, cost, metric) for name, columns in curves.items()} for cost in AXES}
    logged_axes = [cost for cost, rows in by_axis.items() if any(values.size for values in rows.values())]
    axis = axis or next(iter(logged_axes), "episodes")
    logged = {name: rows for name, rows in by_axis[axis].items() if rows.size}
    notes = [
        f"{name} is left out: it has no `{metric}` at its {axis}{_state(run)}."
        for name, run in runs.items()
        if name not in logged
    ]
    if not logged:
        metrics = {name for columns in curves.values() for name in columns if not name.startswith("progress/")}
        hint = did_you_mean(metric, metrics, f"choose `--metric` from {', '.join(sorted(metrics)) or 'no metrics.csv'}")
        if logged_axes:
            hint = f"compare it with `--at {logged_axes[0]}`"
        states = "".join(f"; {name}{_state(run)}" for name, run in runs.items() if _state(run))
        raise ConfigurationError(f"metric: no run has {metric!r} by {axis}; {hint}{states}")
    costs = {name: float(rows[0, -1]) for name, rows in logged.items()}
    seeds = {name: runs[name].settings().get("seed_everything") for name in logged}
    copies = grouped(((runs[name].family(), name if seed is None else seed), name) for name, seed in seeds.items())
    families_by_key: dict[str, dict[Any, str]] = {}
    for (family, seed), names in copies.items():
        longest = families_by_key.setdefault(family, {})[seed] = max(names, key=costs.__getitem__)
        others = [name for name in names if name != longest]
        notes += [f"{name} is left out: its settings and its seed are those of {longest}." for name in others]
    reached = {name: costs[name] for members in families_by_key.values() for name in members.values()}
    largest = max(reached.values())
    notes += [
        f"{name} ends at {end:,.0f} {axis}{_state(runs[name])}; others reached {largest:,.0f}."
        for name, end in reached.items()
        if end < SHORT * largest
    ]
    points = min(reached.values()) * np.arange(1, POINTS + 1) / POINTS
    notes += [
        f"{name} has its first value at {start:,.0f} {axis}, which stands for all costs before it."
        for name in reached
        if (start := float(logged[name][0, 0])) > LATE * points[-1]
    ]
    first = [next(iter(members.values())) for members in families_by_key.values()]
    notes = [*_task_warning([runs[name] for name in first], metric), *notes]
    folders = _folder_names([list(members.values()) for members in families_by_key.values()])
    family_labels = [labels.get(name, name) for name in first] if labels else _labels(list(families_by_key), folders)
    families = [
        Family(
            label,
            {seed: np.interp(points, *logged[name]) for seed, name in members.items()},
            {seed: np.interp(points - points[0] / 2, *logged[name]) for seed, name in members.items()},
            {seed: float(logged[name][1, -1]) for seed, name in members.items()},
        )
        for label, members in zip(family_labels, families_by_key.values(), strict=True)
    ]
    return SeedComparison(metric, axis, points, families, notes)


def _metric_values(columns: Mapping[str, Sequence[float | None]], axis: str, metric: str) -> np.ndarray:
    """Return the costs and the values [2, n] of a metric: the mean of those at one cost, as of a rollout's updates.

    A cost holds until the next one is logged.
    """
    points, cost = [], None
    for logged, value in zip(columns.get(AXES[axis], ()), columns.get(metric, ()), strict=False):
        cost = cost if logged is None else logged + (axis == "updates")  # steps count from 0
        if cost is not None and value is not None:
            points.append((cost, value))
    means = [(cost, math.fsum(values) / len(values)) for cost, values in grouped(points).items()]
    return np.array(means, dtype=float).T


def _task_warning(runs: Sequence[Run], metric: str) -> list[str]:
    """Return a warning if the runs record different tasks; runs of scripts record none."""
    recorded = [run.settings() for run in runs if run.settings()]
    tasks = [{key: str(value) for key, value in settings.items() if TASKS.match(key)} for settings in recorded]
    differing = sorted(
        {key for settings in tasks for key in settings if any(other.get(key) != settings[key] for other in tasks)}
    )
    if not differing:
        return []
    shown = ", ".join(differing[:LABELED]) + (", ..." if len(differing) > LABELED else "")
    return [f"Warning: the rows were trained on different tasks ({shown}); their `{metric}` may not be comparable."]


def _folder_names(families: Sequence[Sequence[str]]) -> list[str]:
    """Return a name for each family: the folder that holds its runs and no other family's, else its first run.

    >>> _folder_names([["a/seed-0", "a/seed-1"], ["b/one", "b/two"], ["b/three"]])
    ['a', 'b/one', 'b/three']
    """
    parents = [{os.path.dirname(name) for name in names} for names in families]
    family_counts = Counter(parent for folders in parents for parent in folders)
    return [
        parent if len(names) > 1 and len(folders) == 1 and family_counts[parent] == 1 and parent else names[0]
        for names, folders in zip(families, parents, strict=True)
        for parent in [min(folders)]
    ]


def _labels(families: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return labels that distinguish families: the settings in which they differ, else their names."""
    settings = [dict(values) if isinstance(values, list) else {} for values in map(json.loads, families)]
    keys = [
        key
        for key in sorted({key for values in settings for key in values})
        if len({values.get(key) for values in settings}) > 1
    ]
    if not 0 < len(keys) <= LABELED or not all(settings):
        return list(names)
    named = list(zip(distinct_tails([key.removesuffix(".class_path") for key in keys], "."), keys, strict=True))
    labels = [", ".join(f"{name}={_value(key, str(values.get(key)))}" for name, key in named) for values in settings]
    return labels if len(set(labels)) == len(labels) else list(names)


def _value(key: str, value: str) -> str:
    """Return a setting's value on one line; for a class only its name.

    >>> _value("model.class_path", "mrlm_pl.GRPO"), _value("model.prompt", "Think.\\nAnswer.")
    ('GRPO', 'Think. Answer.')
    """
    return value.rpartition(".")[2] if key.endswith(".class_path") else " ".join(value.split())


def _state(run: Run) -> str:
    """Return in parentheses the state of a run, with its reason; empty for one that finished or has none."""
    state, reason = run.state()
    description = f"{state}: {' '.join(reason.split())}" if reason else state
    return "" if state in ("unknown", "file", "finished") else f" ({description})"


def _estimate(values: Sequence[float]) -> Estimate:
    return math.fsum(values) / len(values), mean_interval([[value] for value in values])


def _text(estimate: Estimate) -> str:
    mean, low, high = map(number_text, (estimate[0], *estimate[1]))
    return f"{mean} [{low}, {high}]" if all(map(math.isfinite, estimate[1])) else mean
