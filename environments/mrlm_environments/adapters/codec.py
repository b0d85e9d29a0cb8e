"""Observations and actions of Gymnasium's spaces as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import between, check_arguments

READ = 2000
"""Characters at the end of a reply that are read."""

LARGEST = 4096
"""Numbers that an observation may have."""

_NUMBER = re.compile(r"(?<![\d.])-?(?:\d{1,15}(?:\.\d+)?|(?<!\w)\.\d+)(?:[eE][-+]?\d\d?)?(?!\d)")
_COLORED = re.compile(r"(?:\x1b\[[\d;]*m)+(.*?)\x1b\[0m", re.DOTALL)


class IllegalActionError(Exception):
    """A reply names no legal action; the agent reads the message if it may try again."""


class TextCodec:
    """Observations and actions of Gymnasium's spaces as text; override a method to change them.

    In observations numbers are separated by spaces and rows are lines. A board with a plane of 0 and 1 for each kind of
    piece shows the number of the plane, 0 for a free cell; colored characters of rendered text are in brackets.

    The action is the last one in a reply, or in its last ``<action>`` tag: a number or a name for a discrete space, the
    last numbers, as many as needed, for vectors (``MultiDiscrete``, ``MultiBinary``, ``Box``), the whole text for
    ``Text``. Masks are those of ``Discrete``.

    Args:
        actions: names of the discrete actions, in their order; empty: their numbers.
        digits: significant digits of real numbers.

    Raises:
        ConfigurationError: names are equal, or ``digits`` is out of its range.
    """

    @check_arguments
    def __init__(self, actions: Sequence[str] = (), digits: Annotated[int, between(1, 17)] = 3) -> None:
        if isinstance(actions, str) or len({name.lower() for name in actions}) < len(actions):
            raise ConfigurationError(f"TextCodec: actions is {actions!r}; give a list of different names")
        self.actions, self.digits = tuple(actions), digits

    def observation(self, value: Any, agent: str) -> str:
        """Return an agent's observation as text.

        Raises:
            ConfigurationError: it has more than :data:`LARGEST` numbers, like an image.
        """
        return self._text(value)

    def instructions(self, space: Any) -> str:
        """Return how to reply.

        Raises:
            ConfigurationError: the space has no text form, or another number of actions than there are names.
        """
        from gymnasium import spaces

        if isinstance(space, spaces.Discrete):
            if self.actions and len(self.actions) != space.n:
                raise ConfigurationError(f"TextCodec: actions has {len(self.actions)} names; give {space.n}")
            if space.n > 20 and not self.actions:
                return f"Reply with an action from {space.start} to {space.start + space.n - 1}."
            return f"Reply with one of the actions {', '.join(self.legal(space).values())}."
        if isinstance(space, spaces.Text):
            return f"Reply with {space.min_length} to {space.max_length} characters."
        if isinstance(space, spaces.MultiDiscrete):
            bounds: tuple[Any, Any] = space.start, space.start + space.nvec - 1
        elif isinstance(space, spaces.MultiBinary):
            bounds = 0, 1
        elif isinstance(space, spaces.Box):
            bounds = space.low, space.high
        else:
            raise ConfigurationError(f"TextCodec: actions of {space} have no text form; give your own codec")
        low, high = (self._text(np.unique(bound) if np.unique(bound).size == 1 else bound) for bound in bounds)
        return f"Reply with {np.prod(space.shape, dtype=int)} numbers from {low} to {high}."

    def legal(self, space: Any, mask: Any = None) -> dict[int, str]:
        """Return the legal actions of a discrete space with their texts; a mask has a 1 for each."""
        found = range(space.n) if mask is None else np.flatnonzero(mask)
        return {int(space.start + n): self.actions[n] if self.actions else str(space.start + n) for n in found}

    def action(self, reply: str, space: Any, mask: Any = None) -> Any:
        """Return the action that a reply names.

        Raises:
            IllegalActionError: it names none, or one that is not legal.
        """
        from gymnasium import spaces

        stated = reply[-READ:].rpartition("<action>")[2].partition("</action>")[0].strip()
        value: Any = stated
        if isinstance(space, spaces.Discrete):
            names = "|".join(sorted(map(re.escape, self.actions), key=len, reverse=True))
            spoken = (
                re.findall(rf"(?<!\w)(?:{names})(?!\w)", stated, re.IGNORECASE) if names else _NUMBER.findall(stated)
            )
            legal = {name.lower(): value for value, name in self.legal(space, mask).items()}
            if spoken and spoken[-1].lower() in legal:
                return legal[spoken[-1].lower()]
            fault = f"{spoken[-1]} is not legal" if spoken else "Your reply names no action"
            raise IllegalActionError(f"{fault}. {self.choices(space, mask) or self.instructions(space)}")
        if not isinstance(space, spaces.Text):
            size = np.prod(space.shape, dtype=int)
            numbers = np.array([float(number) for number in _NUMBER.findall(stated)[-size:]])
            with np.errstate(over="ignore", invalid="ignore"):  # beyond the space's type: another number, or infinite
                cast = numbers.astype(space.dtype)
            exact = np.isfinite(cast).all() if cast.dtype.kind == "f" else np.array_equal(cast, numbers)
            value = cast.reshape(space.shape) if exact and numbers.size == size else None
        if value is None or not space.contains(value):
            raise IllegalActionError(f"Your reply is no legal action. {self.instructions(space)}")
        return value

    def choices(self, space: Any, mask: Any) -> str:
        """Return a line with the legal actions under a mask; empty without a mask.

        Raises:
            ConfigurationError: the space is not ``Discrete``.
        """
        from gymnasium import spaces

        if mask is None:
            return ""
        if not isinstance(space, spaces.Discrete):
            raise ConfigurationError(
                f"TextCodec: the action_mask {mask!r:.80} of {space} has no text form; give your own codec"
            )
        return f"Legal actions: {', '.join(self.legal(space, mask).values())}"

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return _COLORED.sub(r"[\1]", value).strip("\n")
        if isinstance(value, Mapping):
            return "\n".join(f"{key}: {self._text(part)}" for key, part in value.items())
        if isinstance(value, tuple | list):
            return ", ".join(self._text(part) for part in value)
        array = np.asarray(value)
        if array.size > LARGEST:
            raise ConfigurationError(
                f"TextCodec: an observation has {array.size} numbers (shape {array.shape}); give your own codec"
            )
        if array.ndim == 3 and np.isin(array, (0, 1)).all() and (array.sum(axis=-1) <= 1).all():
            array = np.where(array.any(axis=-1), array.argmax(axis=-1) + 1, 0)
        if array.ndim > 1:
            return ("\n" * (array.ndim - 1)).join(self._text(part) for part in array)
        real = array.dtype.kind == "f"
        return " ".join(f"{number:.{self.digits}g}" if real else str(int(number)) for number in array.ravel())
