"""``mrlm completion bash`` and ``zsh``: a script that completes commands, options and names."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mrlm_pl.cli.main import COMMANDS, TRAINING
from mrlm_pl.cli.parsing.early_check import PACKAGE, class_names, environment_names, training_options
from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.errors import ConfigurationError

SHELLS = ("bash", "zsh")
FIT = "mrlm_pl.cli.commands.fit:RunCommand"
GROUPS = ("--model", "--data", "--trainer", "--checkpoint")
LIGHTNING_OPTIONS = ("--config", "--print_config", "--ckpt_path", "--weights_only", *GROUPS)
"""Options that Lightning's command line adds."""

_OPTION = re.compile(r"--[a-z][a-z0-9_]*")


def run(arguments: Sequence[str]) -> int:
    """Print the script and return exit status 0.

    Raises:
        ConfigurationError: there is no such shell, or shtab is not installed.
    """
    parser = PlainParser("completion", "Print a script that completes commands, options and names in a shell.")
    parser.epilog = 'bash: eval "$(mrlm completion bash)"; zsh: mrlm completion zsh > FOLDER_OF_FPATH/_mrlm'
    parser.add_argument("shell", choices=SHELLS, help="shell that reads the script")
    shell = parser.parse_args(arguments).shell
    try:
        import shtab
    except ImportError as error:
        raise ConfigurationError('completion needs shtab; install it with `pip install "mrlm[completion]"`') from error
    print(shtab.complete(whole_parser(shtab.FILE), shell))
    return 0


def whole_parser(files: Mapping[str, Any]) -> argparse.ArgumentParser:
    """Return a parser of all commands with the names of their options, for completion alone.

    Args:
        files: shtab's marker of an argument that is a file.
    """
    parser = argparse.ArgumentParser(prog="mrlm", allow_abbrev=False)
    parser.add_argument("--version", action="store_true")
    children = parser.add_subparsers(dest="command")
    (_, environments), algorithms = environment_names(), class_names("algorithms")
    training = declared_options(FIT) | {*LIGHTNING_OPTIONS, *training_options()}
    firsts = {"check_env": environments, "completion": SHELLS}
    for command, (target, summary) in COMMANDS.items():
        child = children.add_parser(command, help=summary, allow_abbrev=False)
        trains = command in (*TRAINING, "sweep")
        command_options = declared_options(target) if command != "completion" else set()
        options = command_options | (training if trains else set())
        for option in sorted(options - {"--help"}):
            choices = algorithms if option == "--model" and (trains or command == "recredit") else None
            choices = environments if option.endswith(("-environment", "-environments", ".environment")) else choices
            _add(child, option, choices, files)
        _add(child, "first", firsts.get(command.replace("-", "_")), files)
    return parser


def _add(parser: argparse.ArgumentParser, name: str, choices: Sequence[str] | None, files: Mapping[str, Any]) -> None:
    """Add an argument with its choices, else files as its values."""
    options: dict[str, Any] = {} if name.startswith("-") else {"nargs": "*"}
    argument: Any = parser.add_argument(name, choices=choices, **options)
    if choices is None:
        argument.complete = files


def declared_options(target: str) -> set[str]:
    """Return the options in the source of a function and of the functions of this package that it calls.

    >>> sorted(declared_options("mrlm_pl.cli.commands.report:run"))
    ['--at', '--metric', '--output']
    """
    module, _, function = target.partition(":")
    seen: set[tuple[str, str]] = set()
    pending = [(module, function)]
    options: set[str] = set()
    while pending:
        seen.add(current := pending.pop())
        functions, imported = _source(current[0])
        if current[1] in functions:
            for node in ast.walk(functions[current[1]]):
                match node:
                    case ast.Constant(str(text)) if _OPTION.fullmatch(text):
                        options.add(text)
                    case ast.Call(ast.Attribute(attr="add_subclass_arguments"), [_, ast.Constant(str(group)), *_]):
                        options.add(f"--{group}")
                    case ast.Name(name):
                        called = (imported.get(name, current[0]), name)
                        pending += [called] if called not in seen and called[0].startswith("mrlm_pl.cli.") else []
    return options


@cache
def _source(module: str) -> tuple[dict[str, ast.AST], dict[str, str]]:
    """Return the functions and classes of a module by name, and the module of each name that it imports."""
    tree = ast.parse(PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8"))
    definitions = (node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
    imports = (node for node in tree.body if isinstance(node, ast.ImportFrom))
    return {node.name: node for node in definitions}, {
        name.name: str(node.module) for node in imports for name in node.names
    }
