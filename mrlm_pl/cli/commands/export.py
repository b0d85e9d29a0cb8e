"""``mrlm export CHECKPOINT --output FOLDER``: write the policies of a checkpoint as Hugging Face folders."""

from __future__ import annotations

from collections.abc import Sequence

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.runs.publication import export


def run(arguments: Sequence[str]) -> int:
    """Write and print the folders, and return exit status 0.

    Raises:
        ConfigurationError: there is no such checkpoint or run, or a folder exists or cannot be written.
    """
    parser = PlainParser("export", "Write the trained policies of a checkpoint as Hugging Face folders.")
    parser.add_argument("model", metavar="CHECKPOINT", help="RUN/checkpoints/NAME.ckpt, or a run folder")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="gets a folder for each policy")
    options = parser.parse_args(arguments)
    for folder in export(options.model, options.output):
        print(folder)
    return 0
