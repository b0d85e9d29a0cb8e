"""The code of an environment, which shows whether two evaluations used the same judge."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mrlm_pl.environment import Environment
from mrlm_pl.runs.plugins import plugin_entry_points
from mrlm_pl.runs.records.run import is_installed


def code_of(environment: Environment) -> dict[str, str]:
    """Return a hash of each Python file that an environment depends on, by the name of its module.

    These are the files of its classes and of its values, such as reward functions, with their imports, if they belong
    to the user or to plugin packages; ``mrlm_pl`` and libraries are left out. The YAML files next to the modules of a
    plugin, such as its rules and lists of words, are code too.
    """
    plugins = {entry_point.value.partition(".")[0] for entry_point in plugin_entry_points()} - {"mrlm_pl"}
    hashes, seen = dict[str, str](), set[str]()
    waiting = {
        _module_name(holder) for value in _nested_values(environment, set()) for holder in (value, *type(value).__mro__)
    }
    while waiting:
        seen.add(name := waiting.pop())
        root = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        is_own_code = file.endswith(".py") and (
            root in plugins or not (root in ("mrlm_pl", "__main__") or is_installed(root))
        )
        if is_own_code:
            tables = Path(file).parent.glob("*.yaml") if root in plugins else ()
            files = {name: Path(file), **{f"{sys.modules[name].__package__}/{path.name}": path for path in tables}}
            hashes |= {key: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for key, path in files.items()}
            waiting |= {*map(_module_name, vars(sys.modules[name]).values())} - seen
    return dict(sorted(hashes.items()))


def _nested_values(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield a value, and the values inside an environment, a data class or a collection."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    holds = isinstance(value, Environment) or (is_dataclass(value) and not isinstance(value, type))
    inner = getattr(value, "__dict__", ()) if holds else value
    items = inner.values() if isinstance(inner, Mapping) else inner if isinstance(inner, list | tuple) else ()
    for item in items:
        yield from _nested_values(item, seen)


def _module_name(value: Any) -> str:
    """Return the name of a module, or of the one that defines a class, a function, or the class of another value."""
    name = getattr(value, "__name__" if isinstance(value, ModuleType) else "__module__", None)
    return name if isinstance(name, str) else type(value).__module__
