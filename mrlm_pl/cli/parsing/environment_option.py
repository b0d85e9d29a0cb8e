"""The option ``--environment`` of commands that need no trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from mrlm_pl.cli.parsing.config_files import option_values
from mrlm_pl.cli.parsing.configuration import CLASS, merge_arguments
from mrlm_pl.cli.parsing.parser import CommandParser, command_parser
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.plugins import import_environment, imported, shown_settings
from mrlm_pl.runs.records.run import RecordedRun, read_run

_OPTION = "--environment"


@dataclass(frozen=True)
class RunOptions:
    """The options of a command that plays with a run or a model.

    Args:
        config: all options, with the class and arguments of the environment.
        run: run or model that ``--model`` names.
        name: name of the environment in the run, if ``data.names`` gives one.
        played: class and arguments of the environment, as a configuration file has them.
    """

    config: Any
    run: RecordedRun
    name: str | None = None
    played: Mapping[str, Any] = field(default_factory=dict)

    def name_of(self, environment: Environment) -> str:
        """Return the environment's name in the run, else its own."""
        return self.name or environment.name

    def environment_settings(self) -> dict[str, Any]:
        """Return the environment's arguments."""
        return dict(self.played.get("init_args") or {})

    def shown_settings(self) -> str:
        """Return those that differ from their defaults, in one line."""
        return shown_settings(imported(self.played[CLASS]), self.environment_settings())


def environment_parser(command: str, description: str) -> CommandParser:
    """Return a parser with ``--config``, ``--environment NAME`` and ``--environment.ARGUMENT``."""
    parser = command_parser(command, description)
    parser.add_subclass_arguments(Environment, "environment")
    return parser


def read(parser: CommandParser, arguments: Sequence[str]) -> Any:
    """Return the options with the environment's class and arguments.

    An environment on the command line imports only the plugins up to its own; a configuration file or a help imports
    all.

    Raises:
        ConfigurationError: an option, a file or the environment's arguments hold a mistake.
    """
    pairs = option_values(arguments)
    names = [argument for option, argument in pairs if option in (_OPTION, f"{_OPTION}.class_path")]
    imports_all = any(option in ("--config", "--help", "-h", f"{_OPTION}.help") for option, _ in pairs)
    for name in ["*"] if imports_all else names:
        import_environment(name)
    return parser.read(arguments, {"environment": Environment})


def read_with_run(
    parser: CommandParser,
    arguments: Sequence[str],
    *,
    weights: bool = True,
    files: bool = False,
    without: str | None = None,
) -> RunOptions:
    """Return the options; the default environment is that of the run that ``--model`` names, with its arguments.

    Options for the environment come on top of the run's arguments, even if they name the same environment again.

    Args:
        parser: parser of the command.
        arguments: words of the command line.
        weights: whether the run must have exported its policies.
        files: whether ``--model`` may name a run's configuration file.
        without: message if no run and no model is named; None is the parser's own.

    Raises:
        ConfigurationError: as :func:`read`; there is no environment, the run has several and none is chosen, or the
            run's environment would run a program and no option names it.
    """
    words = list(arguments)
    config, _ = merge_arguments(words, ("model", "environment"))
    model, named = config.get("model"), config.get("environment")
    if isinstance(config.get("data"), dict) or (isinstance(config.get("model"), dict) and CLASS in config["model"]):
        remedy = f"name the run by `--model RUN`{', or its configuration by `--model FILE`' if files else ''}"
        raise ConfigurationError(f"config: `model` and `data` are settings of a run; {remedy}")
    for key, hint in (("model", ""), ("environment", ", or leave it out for the run's own")):
        value = config.get(key, "")
        if not isinstance(value, str if key == "model" else (str, dict)):
            shown = json.dumps(value)
            raise ConfigurationError(f"{key}: expected one name, but the value is {shown}; give one{hint}")
    named = named.get(CLASS) if isinstance(named, dict) else named
    if model is None and without is not None:
        raise ConfigurationError(without)
    if model is None:
        return RunOptions(read(parser, words), RecordedRun({}))
    run = read_run(model, weights=weights, files=files)
    recorded = run.environment_to_play(named, model)
    if recorded is not None:
        if recorded.name is not None and named == recorded.name:
            pairs = pairwise(["", *words])
            words = [word for before, word in pairs if _OPTION not in (before, word, word.partition("=")[0])]
        words = [f"{_OPTION}={json.dumps(recorded.config)}", *words]
    options = read(parser, words)
    return RunOptions(options, run, recorded.name if recorded else None, environment_config(parser, options))


def environment_config(parser: CommandParser, options: Any) -> dict[str, Any]:
    """Return the class and arguments of the environment as a configuration file has them, functions by their paths."""
    config: dict[str, Any] = json.loads(parser.dump(options, format="json", skip_validation=True))["environment"]
    return config
