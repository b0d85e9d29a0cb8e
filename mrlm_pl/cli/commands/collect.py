"""``mrlm collect`` and ``mrlm gateway``: play episodes, or serve programs that play them, and write them to a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from mrlm_pl.cli.commands.evaluate import sampling_of
from mrlm_pl.cli.parsing.config_files import with_first_as
from mrlm_pl.cli.parsing.environment_option import RunOptions, read_with_run
from mrlm_pl.cli.parsing.parser import CommandParser
from mrlm_pl.cli.parsing.play_options import PLAY_OPTIONS, collect_parser, gateway_parser
from mrlm_pl.errors import ConfigurationError, tell
from mrlm_pl.runs.collection import CollectionFile, collect, serve_gateway


def run(arguments: Sequence[str]) -> int:
    """Write the episodes and return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or the file holds something else.
        RolloutError: every episode failed.
    """
    options, run_options, shared = _read_options(collect_parser(), arguments)
    if options.temperatures and options.temperature is not None:
        raise ConfigurationError("temperatures and temperature are both given; leave one of them out")
    tell(f"collecting in {shared['name']} ({run_options.shown_settings()})")
    chosen = {key: options[key] for key in ("filter_reward", "temperatures")}
    file = collect(options.model, options.environment, **chosen, **shared)
    if not file.kept:
        tell(f"warning: no episode has a reward of {options.filter_reward:g} or more, so {file.path} is empty")
    return _print_result(file)


def gateway_run(arguments: Sequence[str]) -> int:
    """Serve until all episodes are played and return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, or the file holds something else.
        RemoteError: the address cannot be used.
    """
    options, _, shared = _read_options(gateway_parser(), arguments)

    def listening(address: str) -> None:
        tell(f"the gateway is at {address}/v1; a program opens an episode by POST {address}/episodes (Ctrl-C ends it)")

    shared |= {"at_once": options.at_once, "listening": listening}
    return _print_result(serve_gateway(options.model, options.environment, **shared))


def _read_options(parser: CommandParser, arguments: Sequence[str]) -> tuple[Any, RunOptions, dict[str, Any]]:
    """Return the options, the recorded run, and the arguments of ``collect`` and ``serve_gateway`` alike."""
    run_options = read_with_run(parser, with_first_as("--model", arguments))
    options = parser.instantiate(run_options.config)
    shared = {
        "sampling": sampling_of(options, run_options.run.sampling),
        "name": run_options.name_of(options.environment),
        "settings": run_options.environment_settings(),
        **{key: options[key] for key in ("output", *PLAY_OPTIONS)},
    }
    return options, run_options, shared


def _print_result(file: CollectionFile) -> int:
    failed = f", {file.failed} failed" if file.failed else ""
    failed += f" (the first: {file.reason})" if file.reason else ""
    view = shlex.join(["mrlm", "view", str(file.path)])
    print(f"{file}{failed}; look at them with `{view}`")
    return 0
