"""Answers the commonest typos before torch is imported: names and keys of trainer, algorithm, data and policies.

Class signatures are read from their source, which takes a tenth of the time that importing them does. What cannot be
known for certain from the source (a class from elsewhere, ``**kwargs`` without a known base) is left to the parser.
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

from mrlm_pl.cli.parsing.config_files import check_exist, check_files, config_files, option_values, place_of_key
from mrlm_pl.errors import ConfigurationError, nearest
from mrlm_pl.runs.plugins import plugin_entry_points

PACKAGE = Path(__file__).parents[2]
FOLDERS = {"model": "algorithms", "data": "data"}
BASES = (PACKAGE / "learner", PACKAGE / "data")
"""Where classes are that ours are based on, besides their own package."""

KINDS = {"model": "algorithm", "data": "data module"}
OWN_PLUGINS = ("mrlm_environments", "mrlm_callbacks")
POLICY = PACKAGE / "policy" / "policy.py"
LEARNER = PACKAGE / "learner"
NESTED = {
    "clip": ("Clip", PACKAGE / "losses" / "clip.py", 2),
    "correction": ("Correction", PACKAGE / "losses" / "corrections.py", 2),
    "kl": ("KL", LEARNER / "kl.py", 2),
    "optimization": ("Optimization", LEARNER / "optimization.py", 2),
    "policies": ("Policy", POLICY, 3),
    "sampling": ("Sampling", PACKAGE / "engines" / "base.py", 2),
    "validation_sampling": ("Sampling", PACKAGE / "engines" / "base.py", 2),
}
"""Settings that hold settings: their class, its file and how many parts its keys have, these settings' own included."""
TRAINER = "pytorch/trainer/trainer.py"
_Given = tuple[tuple[str, ...], Any]
_STRUCTURE = ("class_path", "init_args", "dict_kwargs")


def check(arguments: Sequence[str]) -> None:
    """Refuse a name that no class has, and a key that its class does not have.

    Raises:
        ConfigurationError: file, line and key, with the nearest.
    """
    if any("help" in argument or argument == "-h" for argument in arguments):
        return
    check_exist(arguments)
    files = config_files(arguments)
    check_files(files)
    in_files, options = list(_of_files(files)), list(_of_options(arguments))
    _check_trainer([key for key, _ in options], "--")
    _check_trainer([key for key, _ in in_files], "", files)
    for group, folder in FOLDERS.items():
        known = [name for name in _exported(PACKAGE / folder) if name[0].isupper() and name != "Algorithm"]
        unexported = [
            name for key, name in [*in_files, *options] if key == (group,) and _file_of(PACKAGE / folder, str(name))
        ]
        _check_names((group,), KINDS[group], [*known, *unexported], options)
        _check_names((group,), KINDS[group], [*known, *unexported], in_files, files)
        _check_class((group,), PACKAGE / folder, {}, options, in_files, files)
    _check_policies(options, in_files)
    _check_environment(options, in_files, files)


def check_environment_names(arguments: Sequence[str]) -> None:
    """Refuse the misspelled name of an environment: the first word, or in ``--environment`` or ``--environments``.

    A run has names of its own, so that the name beside ``--model RUN`` is left to the parser.

    Raises:
        ConfigurationError: the name, with the nearest.
    """
    pairs = option_values(arguments)
    if any(option == "--model" and Path(value).is_dir() for option, value in pairs):
        return
    named = [
        *(word for word in arguments[:1] if not word.startswith("-")),
        *(value for option, value in pairs if option == "--environment"),
        *(name.strip() for option, value in pairs if option == "--environments" for name in value.split(",")),
    ]
    _, known = _environment_names()
    _check_names(("environment",), "environment", known, [(("environment",), name) for name in named])


def _check_policies(options: Sequence[_Given], in_files: Sequence[_Given]) -> None:
    """Refuse an option for a policy whose name looks like that of a configured one, and that no seat names."""
    known = {key[2] for key, _ in in_files if key[:2] == ("model", "policies") and len(key) > 2}
    seated = {str(value) for key, value in (*in_files, *options) if key[:2] == ("model", "seats")}
    for name in [key[2] for key, _ in options if key[:2] == ("model", "policies") and len(key) > 2]:
        near = nearest(name, known) if name not in known else None
        if near and not any(name in item for item in seated):
            raise ConfigurationError(
                f"model.policies.{name}: there is no policy {name!r}; did you mean {near!r}? A new policy needs a "
                "seat: name it in `--model.seats` too"
            )


def _check_names(
    place: tuple[str, ...], kind: str, known: Sequence[str], given: Sequence[_Given], files: Sequence[Path] = ()
) -> None:
    """Refuse the name of a class that is misspelled; what is like none of ours is left to the parser."""
    for key, name in given:
        if key != place or not isinstance(name, str) or not name.isidentifier() or name in known:
            continue
        near = nearest(name, known)
        if near and all(item.value in OWN_PLUGINS for item in plugin_entry_points()):
            path = ".".join(place)
            raise ConfigurationError(
                f"{path}: there is no {kind} {name!r}; did you mean {near!r}?{_place(place, files)}"
            )


def _exported(folder: Path) -> list[str]:
    """The concrete classes that a package exports."""
    stub = folder / "__init__.pyi"
    if stub.is_file():
        imports = [item for item in ast.parse(stub.read_text()).body if isinstance(item, ast.ImportFrom)]
        return [alias.name for item in imports for alias in item.names]
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    found = [item.value for item in tree.body if isinstance(item, ast.Assign) and _assigns(item, "__all__")]
    return [name for value in found for name in ast.literal_eval(value)]


def _assigns(item: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in item.targets)


def _environments_folder() -> Path | None:
    found = importlib.util.find_spec(OWN_PLUGINS[0])
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def _environment_names() -> tuple[dict[str, str], list[str]]:
    """Our environments' class names by their short names, and all names of environments."""
    folder, short = _environments_folder(), dict[str, str]()
    if folder is None:
        return short, []
    for file in sorted(folder.rglob("*.py")):
        for cls in _classes(file).values():
            short |= dict.fromkeys(_short_names(cls), cls.name)
    return short, [*short, *_exported(folder), "RemoteEnvironment"]


def _check_environment(options: Sequence[_Given], in_files: Sequence[_Given], files: Sequence[Path]) -> None:
    """Refuse an environment that does not exist, and a key that it does not have."""
    folder = _environments_folder()
    if folder is None:
        return
    place, (short, known) = ("data", "environment"), _environment_names()
    _check_names(place, "environment", known, options)
    _check_names(place, "environment", known, in_files, files)
    _check_class(place, folder, short, options, in_files, files)


def _short_names(cls: ast.ClassDef) -> list[str]:
    values = [item.value for item in cls.body if isinstance(item, ast.Assign) and _assigns(item, "name")]
    return [str(value.value) for value in values if isinstance(value, ast.Constant)]


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


def _check_class(
    place: tuple[str, ...],
    folder: Path,
    short: Mapping[str, str],
    options: Sequence[_Given],
    in_files: Sequence[_Given],
    files: Sequence[Path],
) -> None:
    """Refuse a key that the class at ``place`` does not have; ``short`` has class names by their short names."""
    # A class that an option names takes the keys of options; those of a file may belong to the class named there.
    given = options if any(key == place for key, _ in options) else [*in_files, *options]
    classes = {str(value) for key, value in given if key == place and isinstance(value, str)}
    if len(classes) != 1:
        return
    named = classes.pop()
    if "." in named and named.partition(".")[0] not in ("mrlm_pl", OWN_PLUGINS[0]):
        return
    name = short.get(named, named).rpartition(".")[2]
    file = _file_of(folder, name)
    known = parameters(file, name) if file else None
    path = ".".join(place)
    for key in [key[len(place) :] for key, _ in given if key[: len(place)] == place and len(key) > len(place)]:
        if known and key[0] not in known:
            raise ConfigurationError(_unknown(f"{path}.{key[0]}", name, key[0], known) + _place((*place, *key), files))
        inner, inner_file, depth = NESTED.get(key[0] if len(place) == 1 else "", ("", POLICY, 0))
        fields = parameters(inner_file, inner) if len(key) == depth else None
        if fields and key[-1] not in fields:
            text = _unknown(".".join((*place, *key)), inner, key[-1], fields)
            raise ConfigurationError(text + _place((*place, *key), files))


def _unknown(place: str, name: str, key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    hint = f"did you mean {near!r}? It" if near else "it"
    return f"{place}: {name} has no {key!r}; {hint} accepts: {', '.join(known)}"


def _place(key: Sequence[str], files: Sequence[Path]) -> str:
    found = place_of_key(".".join(key), files)
    return f" ({found})" if found else ""


def parameters(file: Path, name: str) -> tuple[str, ...] | None:
    """Return the parameters of a class, with those that it passes on to its bases; None if the source does not say."""
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
    if made is None and any("dataclass" in ast.unparse(item) for item in found.decorator_list) and not found.bases:
        return tuple(str(ast.unparse(item.target)) for item in found.body if isinstance(item, ast.AnnAssign))
    bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
    if len(bases) != len(found.bases) or not bases:
        return None
    files = (file if bases[0] in classes else None, *(_file_of(folder, bases[0]) for folder in (file.parent, *BASES)))
    base_file = next(filter(None, files), None)
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
def _file_of(folder: Path, name: str) -> Path | None:
    """The module of a package of ours that defines a class."""
    if not name.isidentifier():
        return None
    definition = re.compile(rf"^class {name}\b", re.MULTILINE)
    files = sorted(folder.rglob("*.py"))
    return next((file for file in files if definition.search(file.read_text(encoding="utf-8"))), None)


def _of_files(files: Sequence[Path]) -> Iterator[_Given]:
    for file in files:
        content = yaml.safe_load(file.read_text())
        for group in ("trainer", *FOLDERS):
            yield from _flattened((group,), content.get(group))


def _flattened(path: tuple[str, ...], value: Any) -> Iterator[_Given]:
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
            if len(path) == 1 or (path[1] in (*NESTED, "environment") and len(path) == 2):
                yield from _flattened((*path, str(key)), inner)
            else:
                yield (*path, str(key)), inner


def _of_options(arguments: Sequence[str]) -> Iterator[_Given]:
    for number, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        option, equals, value = argument[2:].partition("=")
        parts = tuple(part for part in option.rstrip("+").split(".") if part not in _STRUCTURE)
        if parts and parts[0] in ("trainer", *FOLDERS):
            value = value if equals else next(iter(arguments[number + 1 :]), "")
            yield parts, value
