"""Blocks and commands of documents and configurations, and commands stopped before their work."""

from __future__ import annotations

import argparse
import itertools
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "configs", "examples")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
OWN_MODULE = "from mrlm_environments import MathEnvironment\n\nclass MyEnvironment(MathEnvironment):\n    pass\n"
"""A stand-in for the reader's own module, ``my_file.py``."""

_BLOCK = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_ASSIGNMENT = re.compile(r"\w+=")


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a language in all documents, each with its place ``FILE:LINE``."""
    return [
        (_place(path, text, match.start()), match.group(2))
        for path, text in _texts(DOCUMENTS)
        for match in _BLOCK.finditer(text)
        if match.group(1) == language
    ]


def outputs() -> dict[str, str]:
    """Return the text block that directly follows a Python block, as its output, by the Python block."""
    return {
        code.group(2): text.group(2)
        for _, page in _texts(DOCUMENTS)
        for code, text in itertools.pairwise(_BLOCK.finditer(page))
        if (code.group(1), text.group(1)) == ("python", "text") and text.start() == code.end() + 2
    }


def inline(start: str) -> list[tuple[str, str]]:
    """Return the inline code in running text that begins with ``start``, each with its place."""
    return [
        (_place(path, text, match.start()), match.group(1))
        for path, text in _texts(DOCUMENTS)
        for match in _INLINE.finditer(_BLOCK.sub(lambda block: "\n" * block.group().count("\n"), text))
        if match.group(1).startswith(start)
    ]


def commands(script: str) -> list[list[str]]:
    """Split a shell script into its commands.

    Continuation lines are joined; the parts of pipes, ``&&`` and ``;`` are separate commands. Comments, assignments
    before a command and redirections are dropped.

    >>> commands("A=1 mrlm fit \\\\\\n  --config 'a b.yaml'  # train\\nmrlm info --json | head -3 > out && make test")
    [['mrlm', 'fit', '--config', 'a b.yaml'], ['mrlm', 'info', '--json'], ['head', '-3'], ['make', 'test']]
    """
    found: list[list[str]] = []
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if redirected:
                redirected = False
            elif set(word) <= set("<>"):
                redirected = True
            elif set(word) <= set("&|;"):
                found += [words] if words else []
                words = []
            elif words or not _ASSIGNMENT.match(word):
                words.append(word)
    return found


def header(path: Path) -> str:
    """Return the comment at the top of a configuration file, without ``#``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:end])


def code_of(text: str) -> str:
    """Return the command lines of a comment or docstring, which are indented or begin with a program.

    >>> code_of("First make it:\\n  mrlm fit --config a.yaml \\\\\\n    --data.groups 2")
    'mrlm fit --config a.yaml \\\\\\n--data.groups 2'
    """
    return "\n".join(line.strip() for line in text.splitlines() if line.startswith(("  ", "python ", "mrlm ")))


def shown_commands() -> dict[str, list[str]]:
    """Return every command of the documents, the configurations' headers and the examples, by its first place."""
    whole = [(place, code) for place, code in inline("mrlm ") if "configs/" in code]
    scripts = [*blocks("bash"), *whole, *((_name(path), code_of(header(path))) for path in CONFIGS)]
    for path in EXAMPLES:
        docstring = re.match(r'"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
        scripts.append((_name(path), code_of(docstring.group(1)) if docstring else ""))
    found: dict[str, list[str]] = {}
    seen: set[tuple[str, ...]] = set()
    for place, script in scripts:
        for words in commands(script):
            if tuple(words) not in seen:
                seen.add(tuple(words))
                found[f"{place} {' '.join(words)}"] = words
    return found


_BUILT: dict[str, Any] = {}
"""Parsers of Lightning's command line, by stage: building them takes as long as parsing."""


class WorkBegins(BaseException):
    """Raised instead of the work of a command after its options are parsed."""


@contextmanager
def stopped_before_work() -> Iterator[None]:
    """Raise :class:`WorkBegins` when a command has parsed its options.

    Commands of the trainer stop before their classes are built, all others when their parser returns. The parsers of a
    stage of the trainer are built once.
    """
    from jsonargparse._typehints import ActionTypeHint
    from lightning.pytorch.cli import LightningCLI

    from mrlm_pl.cli.commands.fit import RunCommand
    from mrlm_pl.cli.parsing.parser import CommandParser

    setup = RunCommand.setup_parser

    def setup_once(self: Any, *args: Any) -> None:
        if self.stage not in _BUILT:
            setup(self, *args)
            _BUILT[self.stage] = self.parser
        self.parser = _BUILT[self.stage]

    short, plain = CommandParser.parse_args, argparse.ArgumentParser.parse_args

    def parse_short(self: Any, *args: Any, **kwargs: Any) -> Any:
        short(self, *args, **kwargs)
        raise WorkBegins

    def parse_plain(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain(self, *args, **kwargs)
        raise WorkBegins

    with (
        mock.patch.object(RunCommand, "setup_parser", setup_once),
        mock.patch.object(ActionTypeHint, "add_sub_defaults"),  # half of the time, for the defaults of nested classes
        mock.patch.object(CommandParser, "parse_args", parse_short),
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_plain),
        mock.patch.object(LightningCLI, "instantiate_classes", side_effect=WorkBegins),
        mock.patch("mrlm_pl.cli.commands.sweep.train_members", side_effect=WorkBegins),
    ):
        yield


def parse(words: Sequence[str]) -> int:
    """Parse a command of ``mrlm`` or a Python file in the working folder, without doing its work.

    Returns:
        0 if its options were parsed, else the status with which it ended.

    Raises:
        AssertionError: the command ended well before its options were parsed.
    """
    from mrlm_pl.cli.main import main

    with stopped_before_work():
        try:
            if words[0] == "mrlm":
                status = main(list(words[1:]))
            else:
                folder = str(Path(words[0]).parent)
                with mock.patch.object(sys, "argv", list(words)), mock.patch.object(sys, "path", [folder, *sys.path]):
                    runpy.run_path(words[0], run_name="__main__")
                status = 0
        except WorkBegins:
            return 0
        except SystemExit as end:
            status = int(end.code or 0)
    if status or any(word.startswith("--print_config") or word.endswith("help") for word in words):
        return status
    raise AssertionError(f"{shlex.join(words)} ended before its options were parsed")


def dedented(block: str) -> str:
    """Return a block without its common indentation."""
    return textwrap.dedent(block)


def _texts(paths: Sequence[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        if path.is_file():
            yield path, path.read_text(encoding="utf-8")


def _place(path: Path, text: str, start: int) -> str:
    return f"{_name(path)}:{text[:start].count(chr(10)) + 1}"


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
