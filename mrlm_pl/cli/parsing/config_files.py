"""Command-line words and YAML files before they are parsed; mistakes are reported with file and line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import yaml

from mrlm_pl.errors import ConfigurationError, did_you_mean, meant, nearest
from mrlm_pl.runs.records.configuration_file import read_yaml_file

_OPTION = "--config"
_SUFFIXES = (".yaml", ".yml")
OWN_CLASS = "name your own class by its path, as in `my_module.MyClass` or `./my_file.py:MyClass`"
NAMED = ("policies", "critics", "agent_critics", "seats", "settings", "task_settings", "weights")
"""Settings whose keys are names that the user chooses; a later file replaces them as a whole."""


def with_underscores(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with underscores for dashes in the names of options; names of policies and agents stay.

    >>> with_underscores(["--num-episodes", "-3", "--model.policies.the-critic.learning-rate=1e-5"])
    ['--num_episodes', '-3', '--model.policies.the-critic.learning_rate=1e-5']
    """

    def spell(word: str) -> str:
        option, equals, value = word[2:].partition("=")
        parts = option.split(".")
        chosen = (part if before in NAMED else part.replace("-", "_") for before, part in pairwise(["", *parts]))
        return f"--{'.'.join(chosen)}{equals}{value}"

    return [spell(word) if word.startswith("--") else word for word in arguments]


def with_first_as(option: str, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the value of an option that may come first, without its name.

    >>> with_first_as("--run", ["runs/a", "--iteration", "3"]), with_first_as("--run", ["--iteration", "3"])
    (['--run', 'runs/a', '--iteration', '3'], ['--iteration', '3'])

    Raises:
        ConfigurationError: the option is given twice, or beside that first value.
    """
    words = [option, *arguments] if arguments and not arguments[0].startswith("-") else list(arguments)
    check_given_once(option, words)
    return words


def check_given_once(option: str, arguments: Sequence[str], between: str = " ") -> None:
    """Reject a second option for the same names, of which the parser would take the last.

    Raises:
        ConfigurationError: the option is given twice; the message joins its values by the text ``between`` them.
    """
    values = [value for name, value in option_values(arguments) if name == option]
    if len(values) > 1:
        remedy = f"give one, or, where the command takes several, `{option} {between.join(values)}`"
        raise ConfigurationError(f"{option[2:]} is given as {' and '.join(map(repr, values))}; {remedy}")


def config_files(arguments: Sequence[str]) -> list[Path]:
    """Return the existing configuration files among the arguments."""
    return [path for path in _named_files(arguments) if path.is_file()]


def check_files(arguments: Sequence[str]) -> None:
    """Validate that the configuration files among the arguments exist and are mappings in YAML.

    Raises:
        ConfigurationError: a missing file, with the nearest in its folder or in ``configs``; a folder; wrong syntax, an
            empty file, no mapping, other ``init_args`` than a mapping, or a duplicate key, with file and line.
    """
    for path in _named_files(arguments):
        if path.suffix in _SUFFIXES and not path.exists():  # other values may be the configuration itself
            candidates = [*Path("configs").rglob("*"), *path.parent.glob("*")]
            by_name = {file.name: file for file in candidates if file.suffix in _SUFFIXES}
            near = nearest(path.name, list(by_name))
            fault = f"config: File does not exist: {str(path)!r}, looked for in {path.parent.resolve()}"
            raise ConfigurationError(f"{fault}; {meant(by_name[near] if near else None)}")
        if path.is_dir():
            files = sorted(str(file) for file in path.iterdir() if file.suffix in _SUFFIXES)
            hint = f"name a file, such as {files[0]!r}" if files else "name a .yaml file"
            raise ConfigurationError(f"config: {str(path)!r} is a folder; {hint}")
    for file in config_files(arguments):
        _keys(file)


def _named_files(arguments: Sequence[str]) -> list[Path]:
    values = [value for option, value in option_values(arguments) if option == _OPTION]
    # A configuration that is written there may be longer than the name of any file.
    short = (name for name in values if len(name) < 4096 and max(map(len, os.fsencode(name).split(b"/"))) < 256)
    return [Path(name) for name in short if name and "\n" not in name]


def option_values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of an option and the word after it or after its ``=``."""
    words = [argument.partition("=") for argument in arguments]
    return [(option, value or after) for (option, _, value), after in zip(words, [*arguments[1:], ""], strict=False)]


class MistakeError(ConfigurationError):
    """A mistake at a key of the configuration."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key

    def in_files(self, words: Sequence[str]) -> ConfigurationError:
        """Return the error with the file and line of the key, unless an option gives it."""
        return ConfigurationError(f"{self}{file_of_key(self.key, words)}")


def file_of_key(key: str, words: Sequence[str]) -> str:
    """Return `` (FILE, line N)`` of a key in the configuration files of a command; empty if an option gives the key."""
    if any(word.replace(".init_args", "").startswith(f"--{key}") for word in words):
        return ""
    parts = [part for part in key.split(".") if part]
    keys = [(file, path, line) for file in config_files(words) for path, line in _keys(file)]
    positions = [f" ({file}, line {line})" for file, path, line in keys if _is_at(parts, path)]
    return positions[-1] if positions else ""


def _is_at(parts: Sequence[str], path: Sequence[str]) -> bool:
    """Return whether a dotted key, which may leave out keys in between, is that of a path.

    >>> _is_at(["model", "low"], ["model", "init_args", "clip", "low"]), _is_at(["model"], ["model", "class_path"])
    (True, False)
    """
    rest = iter(path)
    return all(part in rest for part in parts) and not [*rest]  # each part is sought behind the one before


def unknown_key(owner: str, key: str, known: Collection[str]) -> str:
    """Return the message for a key that a class does not have."""
    if not known:
        return f"{owner} has no {key!r} (it has no settings)"
    return f"{owner} has no {key!r}; {did_you_mean(key, known, 'it accepts: ' + ', '.join(known))}"


def _keys(file: Path) -> list[tuple[Sequence[str], int]]:
    """Return the path of each key in a configuration file, without places in lists, and its line.

    Raises:
        ConfigurationError: see :func:`check_files`.
    """
    read_yaml_file(file, str(file))  # raises for values and keys, which `compose` leaves as text
    top = yaml.compose(file.read_text(encoding="utf-8"), yaml.SafeLoader)
    keys = "keys such as model, data and trainer"
    if top is None:
        raise ConfigurationError(f"{file} is empty; a configuration has {keys}")
    if not isinstance(top, yaml.MappingNode):
        line = top.start_mark.line + 1
        raise ConfigurationError(f"{file}, line {line}: a configuration is a mapping with {keys}")
    return list(_keys_below(top, (), file))


def _keys_below(node: yaml.Node, path: Sequence[str], file: Path) -> Iterator[tuple[Sequence[str], int]]:
    """Yield the keys below a node as :func:`_keys` returns them; ``path`` leads to the node."""
    for item in node.value if isinstance(node, yaml.CollectionNode) else ():
        if isinstance(node, yaml.SequenceNode):
            yield from _keys_below(item, path, file)
            continue
        key, value = item
        name, line = key.value, key.start_mark.line + 1
        if name == "init_args" and not (isinstance(value, yaml.MappingNode) or value.tag == "tag:yaml.org,2002:null"):
            raise ConfigurationError(f"{file}, line {line}: init_args are a mapping, as in `{{NAME: VALUE}}`")
        yield (*path, name), line
        yield from _keys_below(value, (*path, name), file)
