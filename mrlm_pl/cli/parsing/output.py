"""The option ``--output`` of a command."""

from __future__ import annotations

import shlex
from pathlib import Path

from mrlm_pl.durable_files import check_writable
from mrlm_pl.errors import ConfigurationError, writing


def output_file(name: str | None) -> Path | None:
    """Return the file for a report or a table, in a folder that is there; call it before the work.

    Raises:
        ConfigurationError: it is a folder, or cannot be written.
    """
    if name is None:
        return None
    output = Path(name)
    if output.is_dir():
        example = shlex.quote(str(output / "F.json"))
        raise ConfigurationError(f"output: {name!r} is a folder; name a file, as in `--output {example}`")
    with writing("output", name):
        check_writable(output)
    return output
