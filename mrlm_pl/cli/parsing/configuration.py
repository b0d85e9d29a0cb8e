"""The files and options of a command, merged into one configuration of plain data.

A class is a mapping with ``class_path`` and ``init_args``. If a later file or option names another class, the
arguments of the earlier one stay, marked with the class that they were given for; where it is named with ``init_args``,
those that it does not take are dropped. Settings that come before the name of their class are marked with no class.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.cli.parsing.config_files import NAMED, check_files
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.records.configuration_file import read_yaml

CLASS, ARGUMENTS = "class_path", "init_args"
EARLIER = "<earlier>"
"""Key of the mapping with the class that each earlier argument was given for; None if no class was named yet."""

DROPPED = "<dropped>"
"""Key of a class's mapping: the ``init_args`` that it was named with; they, also ``{}``, drop unfit ones of another."""

SWITCHES = ("true", "false", "null")
"""Plain values instead of settings that an option for one of the settings replaces; see :func:`merge_arguments`."""


def merge_arguments(
    arguments: Sequence[str], groups: Collection[str], load: Callable[[str], Any] = read_yaml
) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of all files and of the options that belong to groups, and the other words.

    >>> merge_arguments(["--model", "GRPO", "--model.clip.low=0.1", "-n", "3"], ["model"])
    ({'model': {'class_path': 'GRPO', 'init_args': {'clip': {'low': '0.1'}}}}, ['-n', '3'])

    A group that is null in a file is not given there, as in a printed configuration.

    Args:
        arguments: words of the command line.
        groups: first parts of the dotted names of options.
        load: function that reads YAML.

    Raises:
        ConfigurationError: an option has no value, or a file holds a mistake; see :func:`check_files`.
    """
    check_files(arguments)
    config: dict[str, Any] = {}
    other_words: list[str] = []
    named_values: list[tuple[list[str], Any]] = []
    words = iter(arguments)
    for word in words:
        option, equals, value = word.partition("=")
        path = [part for part in option[2:].rstrip("+").split(".") if part != ARGUMENTS]
        belongs = option == "--config" or (path[0] in groups and path[-1] != "help")
        if not (belongs and option.startswith("--")):
            other_words.append(word)
            continue
        value = value if equals else next(words, "--")
        if not equals and value.startswith("--"):
            raise ConfigurationError(f"there is no value for {option}; give one, as in `{option} VALUE`")
        if option != "--config":
            given = load_value(value, load)
            append = option.endswith("+")
            config = _assign(config, path, given, append)
            named_values += [(path, given)] if {*path[:-1]} & {*NAMED} and not append else []
        else:
            file_config = _read_mapping(value, load, groups)
            config = _merge(config, file_config)
            keys = [f"{key}." for key, _ in leaves(file_config)]
            for path, given in named_values:  # the file may have replaced the whole mapping of names
                if not any(key.startswith(f"{'.'.join(path)}.") for key in keys):
                    config = _assign(config, path, given, append=False)
    return config, other_words


def _read_mapping(value: str, load: Callable[[str], Any], groups: Collection[str]) -> dict[str, Any]:
    """Return the configuration in a file, or one that is written on the command line, without groups that are null."""
    is_file = os.path.isfile(value)  # False for a text that is not a path at all
    try:
        content = load(Path(value).read_text(encoding="utf-8") if is_file else value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"config: {value!r:.80} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        fault = f"config: {value!r:.80} is neither a file nor a mapping"
        raise ConfigurationError(f"{fault}; name a file, as in `--config run.yaml`")
    return {key: item for key, item in content.items() if item is not None or key not in groups}


def load_value(value: str, load: Callable[[str], Any]) -> Any:
    """Return a value; plain ones and invalid YAML stay text, because the parser knows the types."""
    if value[:1] not in ("{", "[") and value not in ("null", ""):
        return value
    try:
        return load(value)
    except (yaml.YAMLError, ValueError):  # such as "{question} Reply with a number."
        return value


def _merge(old: Any, new: Any, name: str = "") -> Any:
    """Return a value over an earlier one."""
    if not isinstance(old, Mapping):
        is_class = isinstance(old, str) and isinstance(new, Mapping) and (CLASS in new or ARGUMENTS in new)
        return _merge({CLASS: old}, new) if is_class else new
    last = new[-1] if isinstance(new, list) and new else None
    if isinstance(last, str) or (isinstance(last, Mapping) and CLASS in last):
        return new if CLASS in old or name in NAMED else [*new[:-1], _merge(old, new[-1])]
    if old and isinstance(new, str) and new not in SWITCHES:
        new = {CLASS: new}
    if not isinstance(new, Mapping) or name in NAMED:
        return new
    if old and CLASS in new and not {CLASS, ARGUMENTS} & {*old}:
        old = {ARGUMENTS: old}
    if old and CLASS in new and old.get(CLASS) != new[CLASS]:
        given, old_class = old.get(ARGUMENTS) or {}, old.get(CLASS)
        old = {**old, EARLIER: {**dict.fromkeys(given, old_class), **old.get(EARLIER, {})}}
        new = {**new, DROPPED: new.get(ARGUMENTS)}
    elif DROPPED in old and CLASS in new and ARGUMENTS in new:
        new = {**new, DROPPED: new[ARGUMENTS]}
    if EARLIER in old:
        earlier = {key: cls for key, cls in old[EARLIER].items() if key not in (new.get(ARGUMENTS) or {})}
        old = {**old, EARLIER: earlier}
    return {**old, **{key: _merge(old.get(key), value, key) for key, value in new.items()}}


def _assign(node: Any, path: Sequence[str], value: Any, append: bool, name: str = "") -> Any:
    """Return the configuration of a name with a value at a path, in the last item of each list on the way."""
    if not path and append:
        before = node if isinstance(node, list) else [] if node is None else [node]
        return [*before, *(value if isinstance(value, list) else [value])]
    if not path:
        return _merge(node, value, name)
    if isinstance(node, list) and node:
        return [*node[:-1], _assign(node[-1], path, value, append)]
    if isinstance(node, bool) or node in SWITCHES:
        node = {}
    node = {CLASS: node} if isinstance(node, str) else node or {}
    first, *rest = path
    if first == CLASS:
        return _merge(node, {CLASS: value})
    if CLASS in node or ARGUMENTS in node:
        inner = node.get(ARGUMENTS) or {}
        assigned = {first: _assign(inner.get(first), rest, value, append, first)}
        earlier = {key: cls for key, cls in node.get(EARLIER, {}).items() if key != first}
        return {**node, ARGUMENTS: {**inner, **assigned}, **({EARLIER: earlier} if EARLIER in node else {})}
    return {**node, first: _assign(node.get(first), rest, value, append, first)}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a configuration with their keys, as options have them.

    >>> dict(leaves({"data": {"class_path": "A", "init_args": {"n": 1}}}))
    {'data.class_path': 'A', 'data.n': 1}
    """
    if not isinstance(value, Mapping) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from leaves(item, key if name == ARGUMENTS else f"{key}.{name}".lstrip("."))
