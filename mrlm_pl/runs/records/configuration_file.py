"""Configurations in YAML as plain data; each key of a mapping may be there once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.errors import ConfigurationError


class _Loader(yaml.SafeLoader):
    """Leaves dates as text, as the parser of commands does: text may look like a date that does not exist."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return a mapping as it is written, before keys of others are merged into it."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in lines:
                fault = f"the key {key.value!r} is in line {lines[key.value]} already"
                raise ConfigurationError(f"{self.name}, line {line}: {fault}; remove one")
            lines[key.value] = line
        return node


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)


def read_yaml(text: str, source: str = "configuration") -> Any:
    """Return the value of a text in YAML.

    Args:
        text: YAML text.
        source: name of the file, for messages.

    Raises:
        ConfigurationError: a key is twice in a mapping, of which YAML would keep the last.
        yaml.YAMLError: it is no YAML.

    >>> read_yaml("a: 1\\na: 2", "run.yaml")
    Traceback (most recent call last):
    mrlm_pl.errors.ConfigurationError: run.yaml, line 2: the key 'a' is in line 1 already; remove one
    """
    loader = _Loader(text)
    loader.name = source
    return loader.get_single_data()


def read_yaml_file(path: str | os.PathLike[str], source: str) -> Any:
    """Return the value of a file; ``source`` is its name in messages.

    Raises:
        ConfigurationError: it cannot be read, or a key is twice in a mapping; names the line.
    """
    try:
        value = read_yaml(Path(path).read_text(encoding="utf-8"), source)
        # raises where an alias is within its own anchor
        json.dumps(value, default=str, skipkeys=True, check_circular=False)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        of_values = isinstance(error, yaml.constructor.ConstructorError)
        hint = "keys and values are plain" if of_values else "check indentation (spaces, no tabs), colons and brackets"
        raise ConfigurationError(f"{source}{where}: {error.problem or error.context}; {hint}") from error
    except RecursionError as error:
        fault = "it is nested too deeply, or an alias (`*NAME`) is within its own anchor (`&NAME`)"
        raise ConfigurationError(f"{source}: {fault}") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        text = f"{source} cannot be read: {error}; name a YAML file"
        raise ConfigurationError(" ".join(text.split())) from error
