"""The plots of the results pages, drawn from ``benchmarks/results/*.json``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half
from benchmarks.tables.costs import SIDES, points
from benchmarks.tables.learning import measured_curves
from benchmarks.tables.results import read

ROOT = Path(__file__).parents[1]
PLOTS = ROOT / "docs" / "images" / "results"


def draw() -> None:
    """Draw the plots."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rc("svg", fonttype="none", hashsalt="mrlm")
    matplotlib.rc("axes.spines", top=False, right=False)
    (PLOTS / "curves").mkdir(parents=True, exist_ok=True)

    for file, top in (("quickstart", 1), ("pretrained", 1), ("pretrained_team", None)):
        with plot(file, figsize=(6, 3.2)) as axes:
            draw_rewards(axes, [row["rewards"] for row in read(file)["rows"]])
            axes.set(xlabel="iteration", ylabel="mean reward of the rollout", ylim=(None, top))

    parity = read("parity")
    with plot("parity", ncols=len(parity["pairs"]), figsize=(6, 3), sharey=True) as panels:
        for axes, (name, pair) in zip(panels, parity["pairs"].items(), strict=True):
            for side, label, color in (("ours", "mrlm", "tab:blue"), ("peer", SIDES[pair["peer"]], "tab:orange")):
                curves = [row[side] for row in pair["rows"]]
                x = [parity["steps"] * (number + 1) / len(curves[0]) for number in range(len(curves[0]))]
                draw_band(axes, curves, x, color, label)
            axes.set(title=name, xlabel="step")
            axes.legend(frameon=False)
        panels[0].set(ylabel="mean reward")

    for file, shared in (("learning", True), ("team_algorithms", False)):  # one task; several
        found = learning_curves(read(file))
        rows = math.ceil(len(found) / 5)
        with plot(file, nrows=rows, ncols=5, figsize=(10, 2.1 * rows), sharex=shared, sharey=shared) as grid:
            for axes in grid.flat[len(found) :]:
                axes.set_axis_off()
            for axes, (name, curves) in zip(grid.flat, found.items(), strict=False):
                draw_rewards(axes, curves)
                axes.set_title(name, fontsize="small")
            axes.figure.supxlabel("iteration")
            axes.figure.supylabel("mean reward of the rollout")
    for stem, panels in curves_by_page().items():
        with plot(f"curves/{stem}", ncols=len(panels), squeeze=False, figsize=(4.2 * len(panels), 2.4)) as grid:
            for axes, panel in zip(grid.flat, panels, strict=True):
                draw_band(axes, panel.curves, panel.x, "tab:blue")
                axes.set(xlabel=panel.steps, ylabel=panel.measure)

    losses = read("token_losses")["summary"]
    with plot("token_losses", figsize=(6, 3.6)) as axes:
        means, halves = ([row[key] for row in losses.values()] for key in ("accuracy", "accuracy_half"))
        axes.errorbar(means, range(len(losses)), xerr=halves, fmt="o", color="tab:blue", capsize=3)
        axes.set(yticks=range(len(losses)), yticklabels=list(losses), xlabel="held-out accuracy after 6 rollouts")
        axes.invert_yaxis()
    draw_costs(read("cost_curves"))


def draw_costs(found: Any) -> None:
    """Draw time and memory over each axis of the cost curves, with dotted lines of linear growth."""
    from matplotlib.ticker import LogLocator

    with plot("cost_curves", nrows=4, ncols=4, figsize=(10, 9)) as grid:
        for number, (name, axis) in enumerate(found["axes"].items()):
            for row, (measure, label) in enumerate((("cpu_s", "processor seconds"), ("memory_mib", "memory in MiB"))):
                axes = grid[2 * (number // 4) + row, number % 4]
                for side, color in (("ours", "tab:blue"), (axis["peer"], "tab:orange")):
                    known = [point for point in points(found, name, side) if "reason" not in point]
                    if known:
                        x, y = ([point[key] for point in known] for key in ("x", measure))
                        axes.loglog(x, y, "o-", color=color, markersize=3, label=SIDES[side])
                        axes.loglog([x[0], x[-1]], [y[-1] * x[0] / x[-1], y[-1]], ":", color=color, linewidth=1)
                ticks = [point["x"] for point in points(found, name, "ours")]
                labels = [f"{tick / 1000:.0f}k" if tick > 1000 else str(tick) for tick in ticks]
                axes.set_xticks(ticks, labels, fontsize="small")
                axes.minorticks_off()
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))  # several ticks also where a decade is not whole
                axes.yaxis.set_major_formatter("{x:g}")
                axes.tick_params(labelsize="small")
                axes.set_ylabel(label, fontsize="small")
                axes.set_xlabel(axis["unit"], fontsize="small")
                if not row:
                    axes.set_title(axis["algorithm"], fontsize="small")
                    axes.legend(frameon=False, fontsize="small")


@contextmanager
def plot(name: str, **settings: Any) -> Iterator[Any]:
    """Yield axes, then write their plot without the date, so that equal results give equal files."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(layout="constrained", **settings)
    yield axes
    figure.savefig(PLOTS / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


@dataclass(frozen=True)
class Panel:
    """A plot of one measure of several seeds.

    Args:
        steps: title of the horizontal axis.
        measure: title of the vertical axis.
        x: the points.
        curves: values at the points, by seed.
    """

    steps: str
    measure: str
    x: Sequence[float]
    curves: Sequence[Sequence[float]]


def learning_curves(found: Any) -> dict[str, list[list[float]]]:
    """Return the rewards of each seed by algorithm, for the runs with rollouts."""
    curves: dict[str, list[list[float]]] = {}
    for row in found["rows"]:
        if "algorithm" in row:
            curves.setdefault(row["algorithm"], []).append(row["rewards"])
        elif "rewards" in row:
            words = row["config"].split()
            name = words[words.index("--model") + 1] if "--model" in words else Path(words[0]).name.upper()
            curves.setdefault({"QUICKSTART": "GRPO"}.get(name, name), []).append(row["rewards"])
    return curves


def curves_by_page() -> dict[str, list[Panel]]:
    """Return the learning curves by the file of the algorithm: those of rollouts, and those of steps on fixed data."""
    stems = {path.stem.replace("_", ""): path.stem for path in (ROOT / "mrlm_pl" / "algorithms").glob("*.py")}
    files = (learning_curves(read(name)) for name in ("team_algorithms", "learning"))
    rewards = {name.lower(): curves for file in files for name, curves in file.items()}
    found: dict[str, list[Panel]] = {}
    for config, measures in measured_curves(read("learning")).items():
        stem = {"teacher": "on_policy_distillation"}.get(Path(config).name, Path(config).name)
        found[stem] = [Panel("optimizer step", axis, *measured) for axis, measured in measures.items()]
    for name, curves in rewards.items():
        if name in stems:  # DAPO is GRPO with settings
            panel = Panel("iteration", "mean reward", *smoothed(curves))
            found.setdefault(stems[name], []).append(panel)
    return found


def draw_rewards(axes: Any, curves: Sequence[Sequence[float]]) -> None:
    """Draw the mean of smoothed rewards by iteration."""
    x, means = smoothed(curves)
    draw_band(axes, means, x, "tab:blue")


def smoothed(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """Return the iterations and the smoothed rewards of each seed."""
    return [float(number + 1) for number in range(len(curves[0]))], [smooth(curve) for curve in curves]


def draw_band(axes: Any, curves: Sequence[Sequence[float]], x: Sequence[float], color: str, label: str = "") -> None:
    """Draw the mean of curves over their points, with its 95 % interval."""
    points = [mean_and_half(values) for values in zip(*curves, strict=True)]
    low, high = ([mean + sign * half for mean, half in points] for sign in (-1, 1))
    axes.plot(x, [mean for mean, _ in points], color=color, label=label)
    axes.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """Return means over each value and those before it.

    >>> smooth([1.0, 2.0, 6.0], 2)
    [1.0, 1.5, 4.0]
    """
    return [statistics.fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
