"""Libraries that an extra installs, imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from mrlm_pl.errors import ConfigurationError


def library(name: str, extra: str, user: str = "") -> ModuleType:
    """Return a module of a library.

    Args:
        name: name of the module.
        extra: extra that installs the library.
        user: setting or class that needs it, for the message; empty if the name of the extra says it.

    Raises:
        ConfigurationError: it, or a library that it needs, is not installed or cannot be loaded.

    >>> library("no_such_library", "gymnasium")
    Traceback (most recent call last):
    mrlm_pl.errors.ConfigurationError: no_such_library is not installed; pip install 'mrlm[gymnasium]'
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = error.name or name
        subject = f"{user} needs {missing}, which" if user else missing
        fault = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be loaded ({error})"
        raise ConfigurationError(f"{subject} {fault}; pip install 'mrlm[{extra}]'") from error


@contextmanager
def asked_for(subject: str) -> Iterator[None]:
    """Turn any error of a library into one that names the subject, such as an environment and its settings.

    Raises:
        ConfigurationError: anything was raised; a ConfigurationError stays as it is.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:  # a library may raise anything
        fault = f"{subject} raised {type(error).__name__}: {error}; correct the one that it names"
        raise ConfigurationError(fault) from error
