"""The option ``--environment`` of commands that need no trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jsonargparse import ActionConfigFile

from mrlm_pl.cli.parser import CommandParser
from mrlm_pl.cli.plugins import import_environment
from mrlm_pl.environment import Environment

_OPTION = "--environment"


def environment_parser(command: str, description: str) -> CommandParser:
    """A parser with ``--config`` and ``--environment NAME``, whose arguments are ``--environment.ARGUMENT``."""
    parser = CommandParser(prog=f"mrlm {command}", description=description, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options.")
    parser.add_subclass_arguments(Environment, "environment", required=True)
    return parser


def parse(parser: CommandParser, arguments: Sequence[str]) -> Any:
    """The options, with the environment built; see :func:`read`."""
    return parser.instantiate(read(parser, arguments))


def read(parser: CommandParser, arguments: Sequence[str]) -> Any:
    """The options, with the environment's class and arguments.

    Only the plugins that are needed to find an environment named on the command line are imported; a configuration
    file may name any, so then all are.

    Raises:
        ConfigurationError: an option, a file or the environment's arguments hold a mistake.
    """
    named = [argument for option, argument in _values(arguments) if option in (_OPTION, f"{_OPTION}.class_path")]
    for name in named or ["*"]:
        import_environment(name)
    if any(option in ("--config", f"{_OPTION}.help") for option, _ in _values(arguments)):
        import_environment("*")
    return parser.parse_args(list(arguments))


def _values(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of an option and the word after it or after its ``=``."""
    pairs = []
    for index, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        pairs.append((option, value or next(iter(arguments[index + 1 :]), "")))
    return pairs
