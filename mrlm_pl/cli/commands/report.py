"""``mrlm report RUN ...``: compare runs over their seeds at equal cost."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError, writing
from mrlm_pl.viewer.runs import Run, find_runs
from mrlm_pl.viewer.seeds import AXES, SeedComparison, compare_seeds, csv_text, plot

PICTURES = (".png", ".pdf", ".svg")
SUFFIXES = (".md", ".csv", *PICTURES)


def run(arguments: Sequence[str]) -> int:
    """Print the table, and write it and the curves; return exit status 0.

    Raises:
        ConfigurationError: a path holds no run, no run has the metric, or a file cannot be written.
    """
    parser = PlainParser("report", "Compare runs over their seeds at equal cost.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folder, or folder of runs")
    add_options(parser)
    text = "files for the table (.md) and the curves (.csv, .png, .pdf, .svg)"
    parser.add_argument("--output", metavar="FILE", type=Path, nargs="+", default=[], help=text)
    options = parser.parse_args(arguments)
    if wrong := next((file for file in options.output if file.suffix not in SUFFIXES), None):
        raise ConfigurationError(f"output: {str(wrong)!r} must end in {', '.join(SUFFIXES)}")
    write(compare_metrics(find_runs(options.runs), options), options.output)
    return 0


def add_options(parser: PlainParser) -> None:
    """Add the options ``--metric`` and ``--at``."""
    text = "column of metrics.csv, or as held_out/math/accuracy; may be repeated; default rollout/reward"
    parser.add_argument("--metric", action="append", type=_named, metavar="METRIC", help=text)
    text = "cost at which runs are compared; default: episodes, or updates for runs on files"
    parser.add_argument("--at", choices=tuple(AXES), help=text)


def _named(metric: str) -> str:
    if not metric:
        raise ConfigurationError("metric is ''; name a column of metrics.csv, as in `--metric rollout/reward`")
    return metric


def compare_metrics(
    runs: Mapping[str, Run], options: argparse.Namespace, labels: Mapping[str, str] | None = None
) -> list[SeedComparison]:
    """Return a comparison for each metric, all at the cost of the first; see :func:`compare_seeds`.

    Raises:
        ConfigurationError: no run has one of the metrics.
    """
    metric, *others = dict.fromkeys(options.metric or ["rollout/reward"])
    first = compare_seeds(runs, metric, options.at, labels)
    return [first, *(compare_seeds(runs, metric, first.axis, labels) for metric in others)]


def write(comparisons: Sequence[SeedComparison], files: Sequence[Path]) -> None:
    """Write comparisons to files in the form of their suffixes, and print their tables, in a terminal within its width.

    Raises:
        ConfigurationError: a file cannot be written, or matplotlib is missing.
    """
    tables = "\n".join(comparison.markdown() for comparison in comparisons)
    for file in files:
        with writing("output", file):
            if file.suffix in PICTURES:
                plot(comparisons, file)
                continue
            with replacing(os.path.realpath(file)) as draft:
                draft.write_text(tables if file.suffix == ".md" else csv_text(comparisons), encoding="utf-8")
    if sys.stdout.isatty():
        console = Console()
        with console.capture() as rendered:
            console.print(Markdown(tables))
        if "…" not in rendered.get():  # else a narrow terminal has cut numbers
            tables = rendered.get()
    print(tables, end="")
