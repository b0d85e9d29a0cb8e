"""Settings: mappings in place of objects, seats of agents, addresses."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from mrlm_pl.errors import ConfigurationError, nearest

T = TypeVar("T")


def as_settings(cls: type[T], value: Any, name: str) -> T:
    """Return the value if it is a ``cls``, else a ``cls`` made from the mapping.

    Args:
        cls: its constructor's arguments are the mapping's keys.
        value: an instance or a mapping.
        name: the setting's name, for messages.

    Raises:
        ConfigurationError: it is neither, or a key does not exist; names the nearest key.

    >>> from fractions import Fraction
    >>> as_settings(Fraction, {"numerator": 1, "denominator": 2}, "share")
    Fraction(1, 2)
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is {value!r:.80}; give a {cls.__name__} or a mapping of its settings")
    known = list(inspect.signature(cls).parameters)
    for key in value:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near!r}? It" if near else "it"
            raise ConfigurationError(f"{name}.{key}: {cls.__name__} has no {key!r}; {hint} accepts: {', '.join(known)}")
    return cls(**value)


def seated_policy(agent: str, seats: Mapping[str, str], policies: Collection[str]) -> str | None:
    """Return the policy that acts for an agent: its seat's, else the only policy, else the policy of the agent's name.

    None if there is none.

    >>> seated_policy("critic", {}, ["main"]), seated_policy("critic", {}, ["solver", "main"])
    ('main', None)
    """
    if agent in seats:
        return seats[agent]
    if len(policies) == 1:
        return next(iter(policies))
    return agent if agent in policies else None


def check_address(target: str) -> None:
    """Validate the address of a server.

    Raises:
        ConfigurationError: it is not ``HOST:PORT``.
    """
    host, _, port = target.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigurationError(
            f"the address {target!r} is not HOST:PORT with a port of 1 to 65535, such as 127.0.0.1:50051"
        )
