"""``mrlm train``: ``mrlm fit`` into a named folder, continued with ``--resume``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mrlm_pl.errors import ConfigurationError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigurationError(f"train: {message}")


def train(arguments: Sequence[str]) -> int:
    """Exit status of ``mrlm train``.

    Raises:
        ConfigurationError: a mistake in the options, or the folder holds a run and ``--resume`` was not given.
    """
    parser = _Parser(prog="mrlm train", allow_abbrev=False, add_help=False)
    parser.add_argument("--output", metavar="FOLDER", help="run folder; a folder that holds a run needs --resume")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue at the folder's last checkpoint, if it has one; the run's own configuration is the default",
    )
    options, rest = parser.parse_known_args(arguments)
    if {"-h", "--help"} & set(rest):
        parser.print_help()
        print("\nand all options of fit:\n")
    elif options.resume and not options.output:
        raise ConfigurationError("train: --resume needs the folder of the run; name it with `--output FOLDER`")
    from mrlm_pl.cli.commands.fit import run_stage
    from mrlm_pl.runs.recorded_run import latest_configuration

    if not options.output:
        return run_stage("fit", rest)
    for key in ("--trainer.default_root_dir", "--ckpt_path"):
        if any(argument.split("=")[0] == key for argument in rest):
            raise ConfigurationError(f"train: {key} cannot be combined with --output; use `mrlm fit`, or leave it out")
    if options.resume and not any(argument.split("=")[0] == "--config" for argument in rest):
        folder = Path(options.output)
        own = latest_configuration(folder) if folder.is_dir() else None
        if own is not None:
            rest = ["--config", str(own), *rest]
        elif not any(argument.startswith("--model") for argument in rest):
            raise ConfigurationError(
                f"train: {options.output!r} holds no run with a configuration to resume; name one with `--config FILE`"
            )
    return run_stage("fit", [*rest, "--trainer.default_root_dir", options.output], resume=options.resume)
