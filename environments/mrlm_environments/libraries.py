"""Libraries that an extra installs, imported on first use."""

from __future__ import annotations

import importlib
from types import ModuleType

from mrlm_pl.errors import ConfigurationError


def library(name: str, extra: str) -> ModuleType:
    """Return a module of a library.

    Args:
        name: of the module.
        extra: that installs the library.

    Raises:
        ConfigurationError: it is not installed.

    >>> library("no_such_library", "gymnasium")
    Traceback (most recent call last):
    mrlm_pl.errors.ConfigurationError: no_such_library is not installed; pip install 'mrlm[gymnasium]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{error.name} is not installed; pip install 'mrlm[{extra}]'") from error
