"""``mrlm init NAME``: write a package with your own environment, algorithm and callback."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from mrlm_pl.cli.parsing.early_check import environment_names
from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.errors import ConfigurationError, writing

TEMPLATE = Path(__file__).parents[1] / "plugin_template"
"""Files of the package, each with the suffix ``.txt``; ``package`` in their paths is the package's name."""


def run(arguments: Sequence[str]) -> int:
    """Write the package and return exit status 0.

    Raises:
        ConfigurationError: the name cannot be a package's, or the folder exists or cannot be written.
    """
    text = "Write a package with an environment, an algorithm, a callback, a configuration and tests."
    parser = PlainParser("init", text)
    parser.add_argument("name", metavar="NAME", help="name of the package, such as my-lab")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="folder to create; default: NAME")
    options = parser.parse_args(arguments)
    folder = options.output or Path(options.name)
    files = write_package(options.name, folder)
    print("\n".join(["wrote", *(f"  {file}" for file in files), "next:"]))
    print(f'  cd {shlex.quote(str(folder))} && pip install -e ".[test]"')
    print("  pytest")
    print("  mrlm fit --config config.yaml")
    return 0


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a plug-in package and return its files.

    Args:
        name: name of the distribution: lower-case words with dashes or underscores between them.
        folder: folder to create.

    Raises:
        ConfigurationError: the name cannot be a package's, or the folder exists or cannot be written.
    """
    package = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*", name) or keyword.iskeyword(package):
        remedy = "use lower-case letters and digits, with dashes between words, such as my-lab"
        raise ConfigurationError(f"name: {name!r} cannot name a package; {remedy}")
    is_module = importlib.util.find_spec(package) is not None or package == "tests"  # the folder of its tests
    if is_module or package in environment_names()[1] or any(importlib.metadata.distributions(name=name)):
        raise ConfigurationError(f"name: a module, environment or package is named {name!r}; choose another name")
    if folder.exists():
        raise ConfigurationError(f"output: {str(folder)!r} exists; name another folder with `--output`")
    words = {"name": name, "package": package, "cls": "".join(word.capitalize() for word in package.split("_"))}
    written = []
    with writing("output", folder):
        for source in sorted(TEMPLATE.rglob("*.txt")):
            target = source.relative_to(TEMPLATE).with_suffix("").as_posix()
            file = folder / re.sub(r"^package(?=/)|(?<=test_)package", package, target)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(source.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(file)
    return written
