"""``mrlm report RUN ...``: compare runs over their seeds at equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.errors import ConfigurationError, writing
from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.seeds import AXES, SeedComparison, compare_seeds

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
    for file in options.output:
        if file.suffix not in SUFFIXES:
            raise ConfigurationError(f"output: {str(file)!r} must end in {', '.join(SUFFIXES)}")
    found = compare_seeds(find_runs(options.runs), options.metric, options.at)
    write(found, options.output)
    print(found.markdown(), end="")
    return 0


def add_options(parser: PlainParser) -> None:
    """Add the options ``--metric`` and ``--at``."""
    text = "column of metrics.csv, or of held-out evaluations, as in held_out/math/accuracy; default rollout/reward"
    parser.add_argument("--metric", default="rollout/reward", help=text)
    text = "cost at which runs are compared; default episodes, else updates, as of runs on files"
    parser.add_argument("--at", choices=tuple(AXES), help=text)


def write(found: SeedComparison, files: Sequence[Path]) -> None:
    """Write a comparison to files in the form of their suffixes.

    Raises:
        ConfigurationError: a file cannot be written, or matplotlib is missing.
    """
    for file in files:
        with writing("output", file):
            file.parent.mkdir(parents=True, exist_ok=True)
            if file.suffix in PICTURES:
                found.plot(file)
            else:
                file.write_text(found.markdown() if file.suffix == ".md" else found.csv(), encoding="utf-8")
