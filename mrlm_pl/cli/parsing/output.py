"""The option ``--output`` of a command."""

from __future__ import annotations

import shlex
from pathlib import Path

from mrlm_pl.durable_files import check_writable
from mrlm_pl.errors import ConfigurationError


def output_file(name: str | None, suffix: str = ".json") -> Path | None:
    """Return the file for a report or a table, in a folder that is there; call it before the work.

    The suffix keeps a mistake from replacing a file of another kind, such as a configuration.

    Raises:
        ConfigurationError: it is a folder, has another suffix, or cannot be written.
    """
    if name is None:
        return None
    output = Path(name)
    if output.is_dir():
        example = shlex.quote(str(output / "F.json"))
        raise ConfigurationError(f"output: {name!r} is a folder; name a file, as in `--output {example}`")
    is_device = output.exists() and not output.is_file()
    if output.suffix != suffix and not is_device:
        raise ConfigurationError(f"output: {name!r} must end in {suffix}; name it `{output.with_suffix(suffix)}`")
    check_writable("output", output)
    return output
