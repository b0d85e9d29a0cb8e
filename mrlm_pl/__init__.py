"""Modular multi-agent reinforcement learning of language models on PyTorch Lightning.

The public names are those of ``__init__.pyi``. Each is imported when it is used, as is each module of the package, such
as ``mrlm_pl.runs``; ``import mrlm_pl`` imports no torch.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import Any


@cache
def _exports() -> Any:
    import lazy_loader  # the sandbox imports this package without any other

    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    attribute, _, names = _exports()
    if name == "__all__":
        return names
    if name in names or name.startswith("_"):
        return attribute(name)
    if name.isidentifier() and find_spec(module := f"{__name__}.{name}"):
        return import_module(module)
    raise AttributeError(_absence(name))


@cache  # the parser of configurations looks here for each of our classes, many times
def _absence(name: str) -> str:
    from mrlm_pl.errors import nearest

    if name in import_module("mrlm_pl.algorithms").__all__:
        return f"mrlm_pl has no {name!r} at its top; it is mrlm_pl.algorithms.{name}"
    # TRL and CoMLRL name trainers
    near = nearest(name.removesuffix("Trainer"), [*(module.name for module in iter_modules(__path__)), *_exports()[2]])
    return f"mrlm_pl has no {name!r}" + (f"; did you mean {near!r}?" if near else "")


def __dir__() -> list[str]:
    return list(_exports()[2])
