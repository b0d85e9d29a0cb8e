"""Report frequent mistakes before torch is imported: names and keys of trainer, algorithm, data and policies.

Signatures are read from the source of the classes, in a tenth of the time of their import. Anything uncertain (a class
of another package, ``**kwargs`` without a known base) is left to the parser, and so are values.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mrlm_pl.cli.parsing.config_files import OWN_CLASS, MistakeError, check_given_once, option_values, unknown_key
from mrlm_pl.cli.parsing.configuration import ARGUMENTS, CLASS, EARLIER, merge_arguments
from mrlm_pl.errors import SYNONYMS, nearest
from mrlm_pl.runs.plugins import plugin_entry_points

PACKAGE = Path(__file__).parents[2]
FOLDERS = {"model": "algorithms", "data": "data"}
SOURCES = (*FOLDERS.values(), "engines", "learner", "losses", "policy", "runs")
"""Packages with the classes of a configuration, their settings and their bases, beside those of environments."""

KINDS = {"model": "algorithm", "data": "data module"}
ENVIRONMENTS = "mrlm_environments"
OWN_PLUGINS = (ENVIRONMENTS, "mrlm_callbacks")
OWN_PACKAGES = ("mrlm_pl.", "mrlm_environments.")
SETTINGS = {
    "clip": "Clip",
    "correction": "Correction",
    "kl": "KL",
    "optimization": "Optimization",
    "policies": "Policy",
    "sampling": "Sampling",
    "validation_sampling": "Sampling",
}
"""Class of arguments that hold settings; ``policies`` holds them by name."""

_NAMED = re.compile(r'^class (\w+)|^ {4}name = "(.+)"$', re.MULTILINE)
"""A class, or the short name of the environment before it."""

TRAINER = "pytorch/trainer/trainer.py"
LINKED = {"data.seed": "seed_everything", "trainer.output": "output", "trainer.resume": "resume"}
"""Arguments that an option of the command sets, and the option."""


def check(arguments: Sequence[str]) -> None:
    """Reject the name of a class, or a key, that does not exist.

    Raises:
        ConfigurationError: file, line and key, with the nearest.
    """
    if any("help" in argument or argument == "-h" for argument in arguments):
        return
    config, _ = merge_arguments(arguments, ("trainer", *FOLDERS))
    try:
        if not isinstance(config.get("trainer", {}), Mapping):
            raise MistakeError("trainer", f"expected a mapping, but the value is {config['trainer']!r}; leave it out")
        data = config.get("data")
        data_arguments = (data.get(ARGUMENTS) or data) if isinstance(data, Mapping) else {}
        groups = {"data": data_arguments, "trainer": config.get("trainer") or {}}
        for key, option in LINKED.items():
            group, name = key.split(".")
            if groups[group].get(name) is not None:
                raise MistakeError(key, f"set it by `{option}` (`--{option}`)")
        _check_keys(config.get("trainer"), "Trainer", _trainer_parameters(), "trainer")
        for group, name in FOLDERS.items():
            _check_class(config.get(group), group, KINDS[group], class_names(name))
        _check_policies(arguments, config)
        short, names = environment_names()
        environment = data_arguments.get("environment")
        _check_class(environment, "data.environment", "environment", names, short)
    except MistakeError as mistake:
        raise mistake.in_files(arguments) from mistake


def check_environment_names(arguments: Sequence[str]) -> None:
    """Reject the misspelled name of an environment: the first word, or in ``--environment`` or ``--environments``.

    A run has its own names, so that the name beside ``--model RUN_OR_FILE`` is left to the parser.

    Raises:
        ConfigurationError: the name, with the nearest; or one of the options is given twice.
    """
    check_given_once("--environment", arguments)
    check_given_once("--environments", arguments, ",")
    pairs = option_values(arguments)
    first = [word for word in arguments[:1] if not word.startswith("-")]
    models = [value for option, value in pairs if option == "--model"]
    # `Path.exists` raises where a name is too long.
    if any(map(os.path.isdir, first)) or any(map(os.path.exists, models)):
        return
    names = [
        *first,
        *(value for option, value in pairs if option == "--environment"),
        *(name.strip() for option, value in pairs if option == "--environments" for name in value.split(",")),
    ]
    for name in names:
        _check_name(name, "environment", "environment", environment_names()[1])


def _check_policies(arguments: Sequence[str], config: Mapping[str, Any]) -> None:
    """Reject an option for a policy that no file or seat names, if a configured one has a similar name."""
    options = re.compile(r"--model\.(?:init_args\.)?policies\.([^.=]+)")
    names = [match.group(1) for argument in arguments if (match := options.match(argument))]
    words = [word for pair in option_values(arguments) if pair[0] == "--config" for word in ("--config", pair[1])]
    configured = _policies(merge_arguments(words, ())[0])
    for name in names:
        near = nearest(name, configured) if name not in configured else None
        if near and name not in str(config["model"].get(ARGUMENTS, {}).get("seats")):
            fault = f"there is no policy {name!r}; did you mean {near!r}? Name a new one in `--model.seats` too"
            raise MistakeError(f"model.policies.{name}", fault)


def _policies(config: Mapping[str, Any]) -> Mapping[str, Any]:
    model = config.get("model")
    policies = (model.get(ARGUMENTS) or {}).get("policies") if isinstance(model, Mapping) else None
    return policies if isinstance(policies, Mapping) else {}  # the parser answers another value


def _check_name(name: Any, key: str, kind: str, known: Sequence[str]) -> None:
    """Reject the misspelled name of a class of ours; any other name is left to the parser."""
    if not isinstance(name, str) or not name.isidentifier() or name in known:
        return
    near = nearest(name, known)
    if near and all(item.value in OWN_PLUGINS for item in plugin_entry_points()):
        raise MistakeError(key, f"there is no {kind} {name!r}; did you mean {near!r}? Otherwise {OWN_CLASS}")


def _check_class(value: Any, key: str, kind: str, names: Sequence[str], short: Mapping[str, str] | None = None) -> None:
    """Reject a class that does not exist, and keys that it does not have; ``short`` has class names by short names."""
    named = value.get(CLASS) if isinstance(value, Mapping) else value
    if not isinstance(named, str):
        return
    name = (short or {}).get(named, named).rpartition(".")[2]
    if name not in names:
        _check_name(named, key, kind, names)
    if name not in names or not isinstance(value, Mapping) or ("." in named and not named.startswith(OWN_PACKAGES)):
        return
    arguments = value.get(ARGUMENTS) or {}
    class_arguments = {name: item for name, item in arguments.items() if value.get(EARLIER, {}).get(name) is None}
    known = parameters(name)
    policy_settings = {*(parameters("Policy") or ())} - {*known} if key == "model" and known else set()
    for argument in (*value, *class_arguments):
        setting = SYNONYMS.get(argument, argument)
        if setting in policy_settings:
            option = f"--{key}.policies.{next(iter(_policies({key: value})), 'main')}.{setting}"
            fault = f"`{setting}` is a setting of a policy; give it as `{option} VALUE`"
            raise MistakeError(f"{key}.{argument}", fault)
    _check_keys(class_arguments, name, known, key)
    for argument in [name for name in SETTINGS if name in class_arguments] if short is None else ():
        cls, settings = SETTINGS[argument], class_arguments[argument]
        inner = settings.items() if argument == "policies" and isinstance(settings, Mapping) else [("", settings)]
        for named, item in inner:
            _check_keys(item, cls, parameters(cls), f"{key}.{argument}{named and '.'}{named}")


def _check_keys(value: Any, owner: str, known: Sequence[str] | None, key: str) -> None:
    # A model's name may stand for a policy.
    value = (value.get(ARGUMENTS, value) or {}) if isinstance(value, Mapping) else {}
    for name in value if known else ():
        if known and name not in (*known, CLASS):
            raise MistakeError(f"{key}.{name}", unknown_key(owner, str(name), known))


def class_names(package: str) -> list[str]:
    """Return the classes that a package of ours exports: ``algorithms`` or ``data``."""
    exports = re.findall(r"\bimport \w+ as (\w+)", (PACKAGE / package / "__init__.pyi").read_text(encoding="utf-8"))
    return [name for name in exports if name[0].isupper() and name != "Algorithm"]


def _trainer_parameters() -> list[str]:
    """Return the parameters of Lightning's trainer."""
    return parameters("Trainer", _folder("lightning") / TRAINER) or []


def _folder(package: str) -> Path:
    """Return the folder of a package that is installed with this one; it is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    return Path(str(spec.origin)).parent


def environment_names() -> tuple[dict[str, str], list[str]]:
    """Return our environments' class names by short name, and all names of environments."""
    folder, short = _folder(ENVIRONMENTS), dict[str, str]()
    for file in sorted(folder.rglob("*.py")):
        names = _NAMED.findall(file.read_text(encoding="utf-8"))
        short |= {name: cls for (cls, _), (_, name) in itertools.pairwise(names) if name}
    return short, [*short, *short.values(), "RemoteEnvironment"]


def training_options() -> list[str]:
    """Return the options of a policy, of the sampling and of rollouts, then those of the trainer and of algorithms."""
    classes = {
        "model.policies.main": "Policy",
        "data.sampling": "Sampling",
        "data": "RolloutDataModule",
        "checkpoint": "LastCheckpoint",
        **{f"model.{name}": SETTINGS[name] for name in ("clip", "correction", "kl", "optimization")},
    }
    options = [f"--{group}.{name}" for group, cls in classes.items() for name in parameters(cls) or ()]
    options += [f"--trainer.{name}" for name in _trainer_parameters()]
    for name in class_names(FOLDERS["model"]):
        options += [f"--model.{parameter}" for parameter in parameters(name) or ()]
    return list(dict.fromkeys(options))


def parameters(name: str, file: Path | None = None) -> list[str] | None:
    """Return the parameters of a class of ours, or in a file, and of the bases to which it passes others.

    None if the source does not say which they are.
    """
    file = file or _files().get(name)
    definition = _classes(file).get(name) if file else None
    if definition is None:
        return None
    constructor = next(
        (item for item in definition.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None
    )
    names: list[str] = []
    if constructor is not None:
        _, *arguments = (*constructor.args.posonlyargs, *constructor.args.args, *constructor.args.kwonlyargs)
        names = [item.arg for item in arguments]
        if constructor.args.kwarg is None:
            return names
    if constructor is None and [ast.unparse(base) for base in definition.bases] == ["Settings"]:
        return [ast.unparse(item.target) for item in definition.body if isinstance(item, ast.AnnAssign)]
    if not definition.bases:
        return None
    inherited: list[str] = []
    for base in map(ast.unparse, definition.bases):
        if base == "ChecksArguments":  # it has none
            continue
        base_names = parameters(base)
        if base_names is None:
            return None
        inherited += base_names
    set_for_base = _base_arguments(constructor) if constructor is not None else set()
    return [*names, *(item for item in dict.fromkeys(inherited) if item not in names and item not in set_for_base)]


def _base_arguments(constructor: ast.FunctionDef) -> set[str]:
    """Return the arguments that a constructor sets for its base."""
    calls = [item for item in ast.walk(constructor) if isinstance(item, ast.Call)]
    base_calls = [call for call in calls if ast.unparse(call.func).endswith(".__init__")]
    return {keyword.arg for call in base_calls for keyword in call.keywords if keyword.arg is not None}


@cache
def _classes(file: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {item.name: item for item in tree.body if isinstance(item, ast.ClassDef)}


@cache
def _files() -> dict[str, Path]:
    """Return the module of each class of ours that a configuration names or has settings of, and of their bases."""
    folders = [_folder(ENVIRONMENTS), *(PACKAGE / name for name in SOURCES)]
    files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
    return {name: file for file in files for name, _ in _NAMED.findall(file.read_text(encoding="utf-8")) if name}
