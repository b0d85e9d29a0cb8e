"""Answers the commonest typos before torch is imported: the keys of trainer, algorithm, data module and policies.

Class signatures are read from their source, which takes a tenth of the time that importing them does. What cannot be
told for certain from the source (a class from elsewhere, ``**kwargs`` without a known base) is left to the parser.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.cli.config_files import check_files, config_files, place_of_key
from mrlm_pl.cli.plugins import nearest
from mrlm_pl.errors import ConfigurationError

PACKAGE = Path(__file__).parents[1]
FOLDERS = {"model": "algorithms", "data": "data"}
POLICY = PACKAGE / "policy" / "hf.py"
TRAINER = "pytorch/trainer/trainer.py"
_STRUCTURE = ("class_path", "init_args", "dict_kwargs")


def check(arguments: Sequence[str]) -> None:
    """Refuse a key that its class does not have.

    Raises:
        ConfigurationError: file, line and key, with the nearest.
    """
    if any("help" in argument or argument == "-h" for argument in arguments):
        return
    files = config_files(arguments)
    check_files(files)
    spelt, options = list(_of_files(files)), list(_of_options(arguments))
    given = [*spelt, *options]
    _check_trainer([key for key, _ in options], "--")
    _check_trainer([key for key, _ in spelt], "", files)
    for group, folder in FOLDERS.items():
        classes = {str(value) for key, value in given if key == (group,) and isinstance(value, str)}
        if len(classes) == 1:
            keys = [key[1:] for key, _ in given if key[0] == group and len(key) > 1]
            _check_class(group, folder, classes.pop(), keys, files)


def _check_trainer(keys: Sequence[tuple[str, ...]], dashes: str, files: Sequence[Path] = ()) -> None:
    found = importlib.util.find_spec("lightning")
    if found is None or not found.submodule_search_locations:
        return
    known = parameters(Path(found.submodule_search_locations[0]) / TRAINER, "Trainer")
    for key in keys:
        if known and key[0] == "trainer" and len(key) > 1 and key[1] not in known:
            near = nearest(key[1], known)
            hint = f"did you mean '{dashes}trainer.{near}'?" if near else f"a trainer has: {', '.join(known)}"
            kind = "option" if dashes else "key"
            raise ConfigurationError(f"there is no {kind} '{dashes}trainer.{key[1]}'; {hint}{_place(key, files)}")


def _check_class(group: str, folder: str, name: str, keys: Sequence[tuple[str, ...]], files: Sequence[Path]) -> None:
    if "." in name and not name.startswith("mrlm_pl."):
        return
    name = name.rpartition(".")[2]
    file = _file_of(folder, name)
    known = parameters(file, name) if file else None
    for key in keys:
        if known and key[0] not in known:
            raise ConfigurationError(_unknown(f"{group}.{key[0]}", name, key[0], known) + _place((group, *key), files))
        if key[0] == "policies" and len(key) == 3:
            fields = parameters(POLICY, "Policy")
            if fields and key[2] not in fields:
                text = _unknown(f"{group}.policies.{key[1]}.{key[2]}", "Policy", key[2], fields)
                raise ConfigurationError(text + _place((group, *key), files))


def _unknown(place: str, name: str, key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    hint = f"did you mean {near!r}? It" if near else "it"
    return f"{place}: {name} has no {key!r}; {hint} accepts: {', '.join(known)}"


def _place(key: Sequence[str], files: Sequence[Path]) -> str:
    found = place_of_key(".".join(key), files)
    return f" ({found})" if found else ""


def parameters(file: Path, name: str) -> tuple[str, ...] | None:
    """The names of a class's parameters, those that it passes on to its bases included; None if they cannot be told."""
    classes = _classes(file)
    found = classes.get(name)
    if found is None:
        return None
    made = next((item for item in found.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    own: list[str] = []
    if made is not None:
        own = [item.arg for item in (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)][1:]
        if made.args.kwarg is None:
            return tuple(own)
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    if len(bases) != len(found.bases) or not bases:
        return None
    base_file = file if bases[0] in classes else _file_of(file.parent.name, bases[0])
    inherited = parameters(base_file, bases[0]) if base_file else None
    if inherited is None:
        return None
    set_here = _passed_on(made) if made is not None else set()
    return tuple(dict.fromkeys((*own, *(item for item in inherited if item not in set_here))))


def _passed_on(made: ast.FunctionDef) -> set[str]:
    """The names that a constructor hands to its base's itself."""
    calls = [item for item in ast.walk(made) if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute)]
    above = [call for call in calls if call.func.attr == "__init__"]  # type: ignore[attr-defined]
    return {keyword.arg for call in above for keyword in call.keywords if keyword.arg is not None}


@cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {item.name: item for item in tree.body if isinstance(item, ast.ClassDef)}


@cache
def _file_of(folder: str, name: str) -> Path | None:
    """The module of a package of ours that defines a class."""
    if not name.isidentifier():
        return None
    definition = re.compile(rf"^class {name}\b", re.MULTILINE)
    files = sorted((PACKAGE / folder).glob("*.py"))
    return next((file for file in files if definition.search(file.read_text(encoding="utf-8"))), None)


def _of_files(files: Sequence[Path]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for file in files:
        content = yaml.safe_load(file.read_text())
        for group in ("trainer", *FOLDERS):
            yield from _flattened((group,), content.get(group))


def _flattened(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys as options have them, with their values; a class's own key has its name."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    if "class_path" in value:
        yield path, value["class_path"]
        value = value.get("init_args") or {}
    elif set(value) == {"init_args"}:
        value = value["init_args"] or {}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if len(path) == 1 or (path[1] == "policies" and len(path) == 2):
                yield from _flattened((*path, str(key)), inner)
            else:
                yield (*path, str(key)), inner


def _of_options(arguments: Sequence[str]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        option, equals, value = argument[2:].partition("=")
        parts = tuple(part for part in option.rstrip("+").split(".") if part not in _STRUCTURE)
        if parts and parts[0] in ("trainer", *FOLDERS):
            value = value if equals else next(iter(arguments[number + 1 :]), "")
            yield parts, value
