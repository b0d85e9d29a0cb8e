"""Finds the classes that commands may name: our own, those of plugin packages, and the short names of environments.

A plugin is any installed distribution with an entry point in the group ``mrlm_pl.plugins`` that names a package. What
the package's ``__all__`` lists can be named on the command line without its path. Ours are found in the same way.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError

GROUP = "mrlm_pl.plugins"
ENVIRONMENTS = "environments"
"""Entry points whose name begins so are imported first, so that an environment is found without what needs torch."""

REMOTE = "mrlm_pl.remote"
"""Our own package of environments: that of servers. It has a class name and no short name, which is the server's."""

SCORERS = "mrlm_pl.verifier"
"""Our own package of scorers of texts, which the arguments of an environment may name."""


def load_package(name: str) -> ModuleType:
    """The package of that name, with all lazy exports of its ``__all__`` imported."""
    package = importlib.import_module(name)
    for export in getattr(package, "__all__", ()):
        getattr(package, export)
    return package


def plugin_entry_points() -> list[EntryPoint]:
    """The installed plugins, those of environments first, else by name."""
    found = entry_points(group=GROUP)
    return sorted(found, key=lambda item: (not item.name.startswith(ENVIRONMENTS), item.name, item.value))


def load_plugins() -> list[ModuleType]:
    """The packages of all installed plugins.

    Raises:
        ConfigurationError: a plugin cannot be imported; the message names the distribution that brought it.
    """
    load_package(SCORERS)
    return [_load_plugin(entry_point) for entry_point in plugin_entry_points()]


def subclasses(base: type) -> Iterator[type]:
    """All classes below ``base`` that have been imported, each once, the nearest first."""
    seen: set[type] = set()
    waiting: list[type] = list(base.__subclasses__())
    while waiting:
        current = waiting.pop(0)
        if current not in seen:
            seen.add(current)
            waiting += current.__subclasses__()
            yield current


def environments_by_name() -> dict[str, type[Environment]]:
    """The environments that imported plugins export, by their short name.

    Raises:
        ConfigurationError: two classes have the same short name.
    """
    named: dict[str, type[Environment]] = {}
    for cls in _exported_classes():
        if not issubclass(cls, Environment) or inspect.isabstract(cls):
            continue
        name = cls.name
        other = named.setdefault(name, cls)
        if other is not cls:
            raise ConfigurationError(
                f"the environments {class_path(other)} and {class_path(cls)} are both named {name!r}; "
                "remove one of the packages or change its `name`"
            )
    return named


def import_environment(name: str) -> None:
    """Import plugins one after another until one brings the environment of that short name or class name.

    A dotted path needs no plugin, nor does the environment of a server. A name that none has is left to the parser,
    which answers with the nearest.
    """
    load_package(SCORERS)
    if "." in name:
        return
    if name == "RemoteEnvironment":
        load_package(REMOTE)
        return
    for entry_point in plugin_entry_points():
        if _knows(name):
            return
        _load_plugin(entry_point)
    load_package(REMOTE)


def class_path(cls: type) -> str:
    """The shortest dotted path under which the class can be imported: its package's, when that exports it.

    >>> class_path(ConfigurationError)
    'mrlm_pl.errors.ConfigurationError'
    """
    parts = cls.__module__.split(".")
    for length in range(1, len(parts)):
        package = importlib.import_module(".".join(parts[:length]))
        if cls.__name__ in getattr(package, "__all__", ()):
            return f"{package.__name__}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that begins with ``name``, else one that looks like it, else one whose last words it is, or None.

    Upper and lower case are alike.

    >>> nearest("mathenvironmet", ["MathEnvironment", "math", "code"])
    'MathEnvironment'
    >>> nearest("clip", ["value_clip", "lam"])
    'value_clip'
    """
    folded = {item.lower(): item for item in known}
    longer = sorted((item for item in folded if name and item.startswith(name.lower())), key=len)
    ends = [item for item in folded if item.endswith(f"_{name.lower()}")]
    found = longer or difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6) or ends
    return folded[found[0]] if found else None


def _exported_classes() -> Iterator[type]:
    """Classes in the ``__all__`` of the plugin packages that have been imported."""
    for entry_point in plugin_entry_points():
        package = sys.modules.get(entry_point.value)
        for export in getattr(package, "__all__", ()):
            item = getattr(package, export)
            if isinstance(item, type):
                yield item


def _knows(name: str) -> bool:
    return name in environments_by_name() or any(cls.__name__ == name for cls in subclasses(Environment))


@cache
def _load_plugin(entry_point: EntryPoint) -> ModuleType:
    try:
        return load_package(entry_point.value)
    except Exception as error:  # a package may fail in any way while it is imported
        distribution = entry_point.dist.name if entry_point.dist else "unknown"
        raise ConfigurationError(
            f"the plugin package {entry_point.value!r} of the distribution {distribution!r} cannot be imported "
            f"({type(error).__name__}: {error}); repair it, or uninstall it with `pip uninstall {distribution}`"
        ) from error
