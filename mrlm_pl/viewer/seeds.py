"""Runs with equal settings: a metric as the mean over their seeds, with 95 % intervals and paired differences."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrlm_pl.errors import ConfigurationError, meant
from mrlm_pl.evaluation.intervals import difference_interval, mean_interval
from mrlm_pl.viewer.runs import Run

AXES = {"episodes": "episodes", "decisions": "decisions", "tokens": "generated_tokens", "iterations": "iteration"}
"""Costs at which runs may be compared, and the column ``progress/...`` of the metrics that counts each."""

POINTS = 100
"""Points of a curve."""

LAST = POINTS // 10
LABELED = 4
"""Settings in a label; runs that differ in more are named by their folders."""

Estimate = tuple[float, tuple[float, float]]
"""A mean and its 95 % interval; infinite bounds where it is unknown, as with one seed."""


@dataclass(frozen=True)
class Family:
    """Runs that differ in their seed alone.

    Args:
        label: the settings in which it differs from the other families.
        curves: the metric at the points of the comparison, by seed; runs without one by their name.
    """

    label: str
    curves: Mapping[Any, np.ndarray]

    def means(self, points: slice) -> dict[Any, float]:
        """Return each seed's mean over some of the points."""
        return {seed: float(curve[points].mean()) for seed, curve in self.curves.items()}

    def estimate(self, points: slice) -> Estimate:
        """Return the mean over the seeds of their means over some of the points."""
        return _estimate(list(self.means(points).values()))


@dataclass(frozen=True)
class SeedComparison:
    """Families of runs at equal cost.

    Args:
        metric: the compared column of ``metrics.csv``.
        axis: name of the cost, of :data:`AXES`.
        points: the costs at which all runs are compared; the last one is the largest that all have reached.
        families: in the order of their runs.
        notes: the runs that are left out, with the reason.
    """

    metric: str
    axis: str
    points: np.ndarray
    families: Sequence[Family]
    notes: Sequence[str]

    def difference(self, family: Family, points: slice) -> tuple[Estimate, int]:
        """Return how much a family exceeds the first one, and the number of pairs: 0 if seeds do not match."""
        own, first = family.means(points), self.families[0].means(points)
        pairs = [own[seed] - first[seed] for seed in own if seed in first]
        if len(pairs) > 1:
            return _estimate(pairs), len(pairs)
        (mean, bounds), (other, other_bounds) = family.estimate(points), self.families[0].estimate(points)
        return (mean - other, difference_interval((mean, bounds), (other, other_bounds))), 0

    def markdown(self) -> str:
        """Return the comparison as a table."""
        cost, (last, whole) = f"{self.points[-1]:,.0f} {self.axis}", (slice(-LAST, None), slice(None))
        head = ["runs", "seeds", f"`{self.metric}`, last tenth of {cost}", "mean over all"]
        rows = [
            [family.label, str(len(family.curves)), _text(family.estimate(last)), _text(family.estimate(whole))]
            for family in self.families
        ]
        if len(rows) > 1:
            head.append("last tenth less the first row's")
            for family, row in zip(self.families, rows, strict=True):
                (difference, pairs) = self.difference(family, last)
                paired = f", {pairs} pairs of seeds" if pairs else ", seeds not paired"
                row.append("" if family is self.families[0] else _text(difference) + paired)
        lines = [head, ["---"] * len(head), *rows]
        table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return "\n".join([table, "", "Means over seeds with 95 % intervals (Student's t).", *self.notes]) + "\n"

    def csv(self) -> str:
        """Return the curves, a row for each family and point."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["runs", "seeds", self.axis, "mean", "low", "high"])
        for family in self.families:
            for at, point in enumerate(self.points):
                mean, bounds = family.estimate(slice(at, at + 1))
                known = [bound if math.isfinite(bound) else "" for bound in bounds]
                writer.writerow([family.label, len(family.curves), float(point), mean, *known])
        return text.getvalue()

    def plot(self, path: Path) -> None:
        """Write the curves as a picture: means with bands, and a thin line for each seed.

        Raises:
            ConfigurationError: matplotlib is missing.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError(
                f"{str(path)!r} needs matplotlib; install it with `pip install 'mrlm[plot]'`, or write .md and .csv"
            ) from error
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        for family in self.families:
            found = [family.estimate(slice(at, at + 1)) for at in range(len(self.points))]
            (line,) = axes.plot(
                self.points, [mean for mean, _ in found], label=f"{family.label} ({len(family.curves)})"
            )
            bounds = np.array([interval for _, interval in found])
            if np.isfinite(bounds).all():
                axes.fill_between(self.points, bounds[:, 0], bounds[:, 1], color=line.get_color(), alpha=0.2)
            for curve in family.curves.values():
                axes.plot(self.points, curve, color=line.get_color(), alpha=0.3, linewidth=0.7)
        axes.set(xlabel=self.axis, ylabel=self.metric)
        axes.legend(title="runs (seeds)")
        figure.savefig(path, format=path.suffix[1:])


def compare_seeds(
    runs: Mapping[str, Run],
    metric: str = "rollout/reward",
    axis: str = "episodes",
    labels: Mapping[str, str] | None = None,
) -> SeedComparison:
    """Return a metric of runs at equal cost, by families of runs that differ in their seed alone.

    The costs are ``POINTS`` equal steps up to the largest one that all runs have reached; between two logged rows a
    metric is interpolated linearly.

    Args:
        runs: by name.
        metric: a column of ``metrics.csv``.
        axis: the cost, of :data:`AXES`.
        labels: of runs by name, for the families that they begin; None names families by the settings that differ.

    Raises:
        ConfigurationError: no run has the metric.
    """
    logged, notes, known = dict[str, np.ndarray](), list[str](), set[str]()
    for name, run in runs.items():
        columns = run.metrics()["columns"]
        known |= {column for column in columns if not column.startswith("progress/")}
        pairs = zip(columns.get(f"progress/{AXES[axis]}", ()), columns.get(metric, ()), strict=False)
        rows = np.array([pair for pair in pairs if None not in pair], dtype=float).T
        if rows.size:
            logged[name] = rows
        else:
            notes.append(f"{name} is left out: it has no `{metric}` at its {axis}.")
    if not logged:
        hint = meant(metric, known, f"they have {', '.join(sorted(known)) or 'no metrics.csv'}")
        raise ConfigurationError(f"metric: no run has {metric!r} by {axis}; {hint}")
    points = min(float(rows[0, -1]) for rows in logged.values()) * np.arange(1, POINTS + 1) / POINTS
    grouped: dict[str, dict[Any, str]] = {}
    for name in logged:
        family, seed = runs[name].family(), dict(runs[name].settings()).get("seed_everything")
        members = grouped.setdefault(family, {})
        if seed is not None and seed in members:
            notes.append(f"{name} is left out: its settings and its seed are those of {members[seed]}.")
        else:
            members[name if seed is None else seed] = name
    first = [next(iter(members.values())) for members in grouped.values()]
    named = [labels.get(name, name) for name in first] if labels else _labels(list(grouped), first)
    families = [
        Family(label, {seed: np.interp(points, *logged[name]) for seed, name in members.items()})
        for label, members in zip(named, grouped.values(), strict=True)
    ]
    return SeedComparison(metric, axis, points, families, notes)


def _labels(families: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return what tells families apart: the settings in which they differ, else the names of their first runs."""
    settings = [dict(json.loads(family)) if family.startswith("[") else {} for family in families]
    differing = [
        key
        for key in sorted({key for found in settings for key in found})
        if len({found.get(key) for found in settings}) > 1
    ]
    if not 0 < len(differing) <= LABELED or not all(settings):
        return list(names)
    return [", ".join(_setting(key, str(found.get(key))) for key in differing) for found in settings]


def _setting(key: str, value: str) -> str:
    """Return a setting for a label.

    >>> _setting("model.class_path", "mrlm_pl.GRPO"), _setting("model.policies.main.learning_rate", "0.001")
    ('model=GRPO', 'learning_rate=0.001')
    """
    owner = key.removesuffix(".class_path")
    return f"{owner.rpartition('.')[2]}={value if owner == key else value.rpartition('.')[2]}"


def _estimate(values: Sequence[float]) -> Estimate:
    return math.fsum(values) / len(values), mean_interval([[value] for value in values])


def _text(estimate: Estimate) -> str:
    mean, bounds = estimate
    return f"{mean:.4g}" + (f" [{bounds[0]:.4g}, {bounds[1]:.4g}]" if all(map(math.isfinite, bounds)) else "")
