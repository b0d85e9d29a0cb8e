"""The classes and functions that commands may name: our own, those of plugin packages, short names of environments.

A plugin is any installed distribution with an entry point in the group ``mrlm_pl.plugins`` that names a package. The
classes and functions in its ``__all__``, or without one all public ones that it defines, can be named on the command
line without their path. Our classes are found in the same way. A class of the working folder is named
``my_file.MyClass`` or ``./my_file.py:MyClass``; functions are named the same way.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_origin

from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError, MRLMError, did_you_mean, source_line_of_error
from mrlm_pl.grouping import mapped

GROUP = "mrlm_pl.plugins"
ENVIRONMENTS = "environments"
"""Entry points whose name begins so are imported first, so that an environment is found without what needs torch."""

CALLBACKS = "callbacks"
"""Entry points whose name begins so have no environments, and are not imported to find one."""

REMOTE = "mrlm_pl.serving"
"""Our own package of environments: that of servers. It has a class name and no short name, which is the server's."""

_IN_FILE = re.compile(r"(.+\.py):([A-Za-z_]\w*)$")

SCORERS = ("mrlm_pl.reward_models", "mrlm_pl.serving.verifiers")
"""Our own package of scorers of texts, which the arguments of an environment may name."""

OWN_PACKAGES = ("mrlm_pl.algorithms", "mrlm_pl.data", "mrlm_pl.engines", "mrlm_pl.serving", *SCORERS)
"""Packages of this one whose classes may be named without their path."""


def load_package(name: str) -> None:
    """Import the package of that name with all lazy exports of its ``__all__``."""
    _import_exports(importlib.import_module(name), None)


def import_packages() -> None:
    """Import our packages and those of all installed plugins, but none of their lazy exports.

    Raises:
        ConfigurationError: a plugin cannot be imported; the message names the distribution that brought it.
    """
    for package in OWN_PACKAGES:
        importlib.import_module(package)
    for entry_point in plugin_entry_points():
        with _naming_plugin(entry_point):
            importlib.import_module(entry_point.value)


def import_exports(name: str | None = None) -> None:
    """Import the lazy exports of our packages and of plugins, as far as these are imported: all, or those of a name.

    Raises:
        ConfigurationError: an export of a plugin cannot be imported.
    """
    for package in OWN_PACKAGES:
        _import_exports(sys.modules.get(package), name)
    for _ in _exports(name):
        pass  # it is imported when it is looked up


def _import_exports(package: ModuleType | None, name: str | None) -> None:
    for export in getattr(package, "__all__", ()):
        if name in (None, export):
            getattr(package, export)


def use_working_folder() -> None:
    """Make modules of the working folder importable, after all others.

    Raises:
        ConfigurationError: the folder was deleted.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigurationError("the current folder was deleted; change to another one with `cd`") from error
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def dotted_path(name: str) -> str:
    """Return the import path of a class in a file, ``./folder/my_file.py:MyClass``; any other name as it is.

    Raises:
        ConfigurationError: there is no such file, its name cannot be imported or is that of another module, or it is
            named without a class.
    """
    match = _IN_FILE.match(name)
    if match is None and name.endswith(".py") and Path(name).is_file():
        named = " or ".join(f"{name}:{item}" for item in _classes_in(Path(name)) or ["MyClass"])
        raise ConfigurationError(f"{name!r} is a file; name a class in it: {named}")
    if match is None:
        return name
    file = Path(match.group(1)).expanduser().resolve()
    if not file.is_file():
        neighbors = sorted(item.name for item in file.parent.glob("*.py"))
        hint = did_you_mean(file.name, neighbors, f"it is looked for in {file.parent}")
        raise ConfigurationError(f"{name!r}: there is no file {match.group(1)!r}; {hint}")
    if not file.stem.isidentifier():
        fault, remedy = f"{name!r}: {file.stem!r} is no name of a Python module", re.sub(r"\W|^(?=\d)", "_", file.stem)
        raise ConfigurationError(f"{fault}; rename the file, as in {remedy}.py")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.find_spec(file.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != file:
        raise ConfigurationError(f"{name!r}: another module is named {file.stem!r}; rename the file")
    return f"{file.stem}.{match.group(2)}"


def _classes_in(file: Path) -> list[str]:
    """Return the names of the classes at the top of a file; empty if it is no Python."""
    with suppress(SyntaxError, ValueError):
        nodes = ast.parse(file.read_text(encoding="utf-8")).body
        return [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return []


def imported(name: str) -> Any:
    """Return the class or function at an import path.

    Raises:
        ImportError: there is no such object; the message has the nearest name, or the place where importing its module
            failed.
    """
    module, _, attribute = name.rpartition(".")
    try:
        imported_module = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ImportError(_import_fault(module, error)) from error
        where = "its folder must be the working folder or on PYTHONPATH"
        hint = did_you_mean(error.name, sorted(file.stem for file in Path.cwd().glob("*.py")), where)
        raise ImportError(f"there is no module {error.name!r}; {hint}") from error
    except Exception as error:  # a module may fail in any way while it is imported
        raise ImportError(_import_fault(module, error)) from error
    if not hasattr(imported_module, attribute):
        names = [key for key in vars(imported_module) if not key.startswith("_")]
        hint = did_you_mean(attribute, names, "check its spelling")
        raise ImportError(f"module {module!r} has no {attribute!r}; {hint}")
    return getattr(imported_module, attribute)


def _import_fault(module: str, error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        source = f"{error.filename}:{error.lineno}"
    else:
        source = source_line_of_error(error)
    return f"importing {module!r} failed: {type(error).__name__}: {error}{f' ({source})' if source else ''}"


def plugin_entry_points() -> list[EntryPoint]:
    """Return the installed plugins, those of environments first, else by name."""
    return list(_entry_points(tuple(sys.path)))


@cache
def _entry_points(path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the plugins of the distributions on a search path, all of whose files are read."""
    plugins = entry_points(group=GROUP)
    return sorted(
        plugins,
        key=lambda entry_point: (not entry_point.name.startswith(ENVIRONMENTS), entry_point.name, entry_point.value),
    )


def subclasses(base: type) -> list[type]:
    """Return all classes below ``base`` that have been imported, each once, the nearest first."""
    found: list[type] = [base]
    for cls in found:  # to which it adds
        derived: list[type] = cls.__subclasses__()
        found += [other for other in derived if other not in found]
    return found[1:]


def environments_by_name() -> dict[str, type[Environment]]:
    """Return the environments that imported plugins export, by their short name.

    Raises:
        ConfigurationError: two classes have the same short name.
    """
    by_name: dict[str, type[Environment]] = {}
    for _, cls in _exports():
        if not isinstance(cls, type) or not issubclass(cls, Environment) or inspect.isabstract(cls):
            continue
        if (first_class := by_name.setdefault(cls.name, cls)) is not cls:
            fault = f"the environments {class_path(first_class)} and {class_path(cls)} are both named {cls.name!r}"
            raise ConfigurationError(f"{fault}; remove one of the packages or change its `name`")
    return by_name


def import_environment(name: str) -> None:
    """Import plugins one after another until one brings the environment of that short name or class name.

    A path needs no plugin, nor does the environment of a server. A name that none has is left to the parser, which
    answers with the nearest.
    """
    for package in SCORERS:
        load_package(package)
    if "." in name:
        return
    plugins = [item for item in plugin_entry_points() if not item.name.startswith(CALLBACKS)]
    for entry_point in plugins if name != "RemoteEnvironment" else ():
        if name in environments_by_name() or any(cls.__name__ == name for cls in subclasses(Environment)):
            return
        with _naming_plugin(entry_point):
            load_package(entry_point.value)
    load_package(REMOTE)


def find_environment(name: str) -> type[Environment]:
    """Return the environment class of a short name, a class name or a path.

    Raises:
        ConfigurationError: there is no such class; the message has the nearest.
    """
    import_environment(name)
    if "." in name:
        try:
            cls = imported(dotted_path(name))
        except ImportError as error:
            raise ConfigurationError(f"environment {name!r}: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Environment)):
            raise ConfigurationError(f"environment {name!r} is no subclass of mrlm_pl.environment.Environment")
        return cls
    environments = environments_by_name()
    classes = {cls.__name__: cls for cls in subclasses(Environment) if not inspect.isabstract(cls)} | environments
    if name in classes:
        return classes[name]
    hint = did_you_mean(name, classes, f"they are {', '.join(environments)}")
    raise ConfigurationError(f"there is no environment {name!r}; {hint}, or a path such as my_file.MyEnvironment")


def environment_from(config: Mapping[str, Any]) -> Environment:
    """Return the environment of a class and its arguments, as a run's configuration has them.

    Raises:
        ConfigurationError: the class cannot be imported, or rejects the arguments.
    """
    from jsonargparse import ArgumentParser

    config = mapped(config, _importable)
    import_environment(str(config["class_path"]))
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Environment, "environment", required=True)
    try:
        return parser.instantiate(parser.parse_object({"environment": config})).environment
    except (ArgumentError, ValueError) as error:  # the library hides the error of the class
        if isinstance(error.__cause__, MRLMError):
            raise error.__cause__ from error
        raise ConfigurationError(f"environment {config['class_path']}: {error}") from error


@cache
def defaults(cls: type) -> dict[str, Any]:
    """Return the defaults of a class as a configuration file has them."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, fail_untyped=False)
    plain: dict[str, Any] = json.loads(json.dumps(parser.get_defaults().as_dict(), default=str))
    return plain


def shown_settings(cls: type[Environment], arguments: Mapping[str, Any]) -> str:
    """Return the arguments of an environment that differ from its defaults, in one line."""
    usual_values = defaults(cls) if arguments else {}
    changed = {key: value for key, value in arguments.items() if key not in usual_values or value != usual_values[key]}
    return ", ".join(f"{key} {json.dumps(value, ensure_ascii=False)}" for key, value in changed.items()) or "defaults"


def _importable(value: Any) -> Any:
    """Return the import path of a class or function in a file that exists, ``FILE.py:NAME``; any other value as it is.

    >>> _importable("uvicorn app.py:main")
    'uvicorn app.py:main'
    """
    match = _IN_FILE.match(value) if isinstance(value, str) else None
    return dotted_path(value) if match and Path(match[1]).expanduser().is_file() else value


def class_path(cls: type) -> str:
    """Return the shortest dotted path by which the class can be imported: of the outermost package that exports it.

    >>> class_path(ConfigurationError)
    'mrlm_pl.ConfigurationError'
    """
    packages = cls.__module__.split(".")
    for length in range(1, len(packages)):
        package = importlib.import_module(".".join(packages[:length]))
        if cls.__name__ in getattr(package, "__all__", ()):
            return f"{package.__name__}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def is_usable(cls: type) -> bool:
    """Return whether a class is concrete and public."""
    return not (inspect.isabstract(cls) or cls.__name__.startswith("_") or "<locals>" in cls.__qualname__)


def is_offered(cls: type) -> bool:
    """Return whether a class can be used by its name: concrete and public; ours and Lightning's also exported."""
    inner = cls.__module__.startswith(("mrlm_pl.", "lightning."))
    return is_usable(cls) and not (inner and class_path(cls) == f"{cls.__module__}.{cls.__qualname__}")


def plugin_functions(name: str | None = None) -> dict[str, Any]:
    """Return the functions that installed plugins export, or those of a name, by import path; each once.

    Raises:
        ConfigurationError: a plugin cannot be imported.
    """
    import_packages()
    functions: dict[int, tuple[str, Any]] = {}
    for path, export in _exports(name):
        is_alias = get_origin(export) is not None  # of a type, such as `Callable[[str], str]`, which can be called
        if callable(export) and not isinstance(export, type) and not is_alias:
            functions.setdefault(id(export), (path, export))
    return dict(functions.values())


def _exports(name: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the exports of imported plugin packages, all or those of a name, each with its import path.

    Exports are those of ``__all__``, else all public names that a package defines itself.

    Raises:
        ConfigurationError: an export cannot be imported.
    """
    for entry_point in plugin_entry_points():
        package = sys.modules.get(entry_point.value)
        if package is None:
            continue
        exports = getattr(package, "__all__", None)
        own_prefix = f"{entry_point.value}."
        for export in (
            exports if exports is not None else [value for value in vars(package) if not value.startswith("_")]
        ):
            if name in (None, export):
                with _naming_plugin(entry_point):
                    value = getattr(package, export)
                if exports is not None or f"{getattr(value, '__module__', '')}.".startswith(own_prefix):
                    yield f"{entry_point.value}.{export}", value


@contextmanager
def _naming_plugin(entry_point: EntryPoint) -> Iterator[None]:
    """Name the plugin in the error of an import."""
    try:
        yield
    except Exception as error:  # a package may fail in any way while it is imported
        distribution = entry_point.dist.name if entry_point.dist else "unknown"
        fault = f"the plugin package {entry_point.value!r} of the distribution {distribution!r} cannot be imported"
        remedy = f"repair it, or uninstall it with `pip uninstall {distribution}`"
        raise ConfigurationError(f"{fault} ({type(error).__name__}: {error}); {remedy}") from error
