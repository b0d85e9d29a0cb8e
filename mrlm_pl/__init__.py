"""Modular multi-agent reinforcement learning of language models on PyTorch Lightning.

The public names are those of ``__init__.pyi``. Each is imported when it is used; ``import mrlm_pl`` imports no torch.
"""

from functools import cache
from typing import Any


@cache
def _exports() -> Any:
    import lazy_loader  # the sandbox imports this package without any other

    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    attribute, _, names = _exports()
    return names if name == "__all__" else attribute(name)


def __dir__() -> list[str]:
    return list(_exports()[2])
