"""Options: their ranges, mappings instead of objects, seats of agents, addresses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import ipaddress
import math
import sys
from abc import ABCMeta
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from mrlm_pl.errors import ConfigurationError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that an option may be; ``Annotated`` with it, :func:`check_arguments` checks it.

    Args:
        holds: whether a number is one of them.
        text: the numbers in words, for messages.
    """

    holds: Callable[[Any], bool]
    text: str

    def check(self, owner: str = "", **options: Any) -> None:
        """Validate that options lie in the range; None is an option that is not set.

        Args:
            owner: prefix of the message, such as ``"data."``.
            options: values by name.

        Raises:
            ConfigurationError: a value lies outside.

        >>> at_least(1).check("math: ", max_attempts=0)
        Traceback (most recent call last):
        mrlm_pl.errors.ConfigurationError: math: max_attempts is 0; it must be 1 or above
        """
        for name, value in options.items():
            try:
                valid = value is None or self.holds(value)
            except TypeError as error:  # a value of another type has no order
                kind = f"a {type(value).__name__}"
                raise ConfigurationError(f"{owner}{name} is {value!r}, {kind}; it must be {self.text}") from error
            if not valid:
                raise ConfigurationError(f"{owner}{name} is {value!r}; it must be {self.text}")


def at_least(least: float) -> Range:
    """Return the range of the finite numbers that are at least ``least``."""
    return Range(lambda value: least <= value < math.inf, f"{least:g} or above")


def between(low: float, high: float) -> Range:
    """Return the range ``[low, high]``."""
    return Range(lambda value: low <= value <= high, f"from {low} to {high}")


POSITIVE = Range(lambda value: 0 < value < math.inf, "above 0 and finite")

NonNegativeInt = Annotated[int, at_least(0)]
PositiveInt = Annotated[int, at_least(1)]
NonNegativeFloat = Annotated[float, at_least(0)]
PositiveFloat = Annotated[float, POSITIVE]
UnitInterval = Annotated[float, between(0, 1)]
FractionAboveZero = Annotated[float, Range(lambda value: 0 < value <= 1, "above 0 and at most 1")]
FractionBelowOne = Annotated[float, Range(lambda value: 0 <= value < 1, "at least 0 and below 1")]


def as_settings(cls: type[T], value: Any, name: str) -> T:
    """Return the value if it is a ``cls``, else a ``cls`` made from the mapping.

    Args:
        cls: class whose constructor takes the keys of the mapping as arguments.
        value: an instance or a mapping.
        name: name of the setting, for messages.

    Raises:
        ConfigurationError: the value is neither, or a key does not exist; the message names the nearest key.

    >>> from fractions import Fraction
    >>> as_settings(Fraction, {"numerator": 1, "denominator": 2}, "share")
    Fraction(1, 2)
    """
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is {value!r:.80}; give {cls.__name__} or a mapping of its settings")
    parameters = list(inspect.signature(cls).parameters)
    for key in value:
        if key not in parameters:
            hint = did_you_mean(str(key), parameters, f"it accepts: {', '.join(parameters)}")
            raise ConfigurationError(f"{name}.{key}: {cls.__name__} has no {key!r}; {hint}")
    return cls(**value)


def check_arguments(function: F) -> F:
    """Return a function whose calls name the nearest argument for an unknown one, and take no float as int.

    Of arguments that are annotated as numbers it takes a scalar of NumPy or torch as the number of Python that it
    holds, which alone a checkpoint may hold. It rejects other values than a whole number for an ``int``, a number for a
    ``float``, and True or False for a ``bool``; those out of a :class:`Range` in the annotation; values that a
    ``Literal`` does not list, unless they are functions and the annotation has those too; and None for a number, text
    or choice that must have a value: all would fail, or mean something else, where the argument is used. A mapping for
    a class of :class:`Settings` becomes an instance; see :func:`as_settings`. So it does with the values in lists,
    tuples and dictionaries. Keywords of any name are taken as they are; they belong to the functions that this one
    calls.
    """
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if open_ended and not function.__module__.startswith("mrlm_pl."):
        return function  # Lightning's `save_hyperparameters` follows the frames of a user's constructors
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    optional = {name for name, parameter in parameters.items() if parameter.default is None}

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        owner = type(arguments[0]) if function.__name__ == "__init__" else function
        if not open_ended:
            check_known(options, parameters, owner)
        named = dict(zip(positional, arguments, strict=False)) | options
        # The annotations of a data class are names of its module, and of those of its bases.
        kinds = _kinds(owner if dataclasses.is_dataclass(owner) else function)
        for name in filter(kinds.__contains__, named):
            named[name] = kinds[name].checked(named[name], f"{owner.__name__}: ", name, name in optional)
        first = [named[name] for name in positional[: len(arguments)]]
        return function(*first, *arguments[len(positional) :], **{name: named[name] for name in options})

    return checked  # type: ignore[return-value]


_NUMBERS = {bool: "true or false", int: "a whole number", float: "a number"}


class _Kind:
    """The values that an annotation allows: types, listed choices, ranges, and the kind of the values inside."""

    def __init__(self, hint: Any) -> None:
        members = _members(hint)
        self.ranges = [each for each in members if isinstance(each, Range)]
        self.types = [get_origin(each) or each for each in members if not isinstance(each, Range)]
        listed = all(each in (Literal, Callable, NoneType) for each in self.types)
        choices = [value for each in members if get_origin(each) is Literal for value in get_args(each)]
        self.choices = choices if listed else []
        classes = [each for each in self.types if isinstance(each, type)]
        settings = [each for each in classes if issubclass(each, Settings)]
        self.settings = settings[0] if settings and len(classes) == len(self.types) else None
        containers = [each for each in members if get_origin(each) in (list, tuple, Sequence, dict, Mapping)]
        inside = {each for hint in containers for each in get_args(hint)[get_origin(hint) in (dict, Mapping) :]} - {...}
        inner: _Kind | None = _Kind(inside.pop()) if len(containers) == len(inside) == 1 else None
        self.inner: _Kind | None = inner if inner and (inner.must_be or inner.inner) else None

    @property
    def must_be(self) -> Any:
        """True if numbers, choices or settings are all that it allows, beside None."""
        return self.numbers or self.choices or self.settings

    @property
    def numbers(self) -> list[type]:
        """The types of numbers, if all values but None are numbers."""
        types = [each for each in self.types if each is not NoneType]
        return types if all(each in [*_NUMBERS] for each in types) else []

    def checked(self, value: Any, owner: str, name: str, optional: bool = False) -> Any:
        """Return an allowed value, with Python's numbers for scalars of other libraries.

        Raises:
            ConfigurationError: the value is not of the kind.
        """
        if any(each in self.types for each in _NUMBERS):
            value = plain(value)
        if value is None:
            if not optional and NoneType not in self.types and (self.must_be or self.types == [str]):
                raise ConfigurationError(f"{owner}{name} is None; give a value")
            return value
        made_here = isinstance(value, Mapping) or Callable not in self.types  # else the function answers it
        if self.settings and made_here and not isinstance(value, tuple(self.types)):
            return as_settings(self.settings, value, f"{owner}{name}")
        accepted = tuple(self.numbers) + (int,) * (float in self.numbers)
        if accepted and not (bool in accepted if isinstance(value, bool) else isinstance(value, accepted)):
            words = [" or ".join(_NUMBERS[each] for each in self.numbers), *(each.text for each in self.ranges)]
            raise ConfigurationError(f"{owner}{name} is {value!r}; it must be {', '.join(words)}")
        if self.choices and not (Callable in self.types and callable(value)):
            one_of(self.choices, owner, **{name: value})
        if isinstance(value, int | float):
            for each in self.ranges:
                each.check(owner, **{name: value})
        return self._contained(value, owner, name) if self.inner else value

    def _contained(self, value: Any, owner: str, name: str) -> Any:
        """Return a container of allowed values: the same object, which others may add to, if nothing changes."""
        assert self.inner is not None
        if hasattr(value, "tolist") and type(value) not in self.types:
            value = value.tolist()
        items = value if isinstance(value, Mapping) else dict(enumerate(value)) if type(value) in (list, tuple) else {}
        found = {key: self.inner.checked(item, owner, f"{name}[{key!r}]") for key, item in items.items()}
        if all(found[key] is items[key] for key in items):
            return value
        return found if items is value else type(value)(found.values())


@functools.cache  # at the first call: an annotation may name what its module defines later
def _kinds(function: Callable[..., Any]) -> dict[str, _Kind]:
    """Return the kind of each argument by name."""
    owners = reversed(getattr(function, "__mro__", [function]))
    hints = [(owner, *item) for owner in owners for item in getattr(owner, "__annotations__", {}).items()]
    return {name: _Kind(_hint(owner, annotation)) for owner, name, annotation in hints}


def _hint(owner: Any, annotation: Any, missing: frozenset[Any] = frozenset()) -> Any:
    """Return the type in an annotation of a function or a class, ``Any`` if it holds none that exists here."""
    one = SimpleNamespace(__annotations__={"": annotation}, __wrapped__=owner)
    names = getattr(sys.modules.get(owner.__module__), "__dict__", {}) if isinstance(owner, type) else None
    try:
        return get_type_hints(one, names, dict.fromkeys(missing, list), include_extras=True)[""]
    except NameError as error:  # only type checkers import the name; a list may have parameters too
        return Any if error.name in missing else _hint(owner, annotation, missing | {error.name})
    except (AttributeError, SyntaxError, TypeError):  # it is not a type
        return Any


def _members(hint: Any) -> list[Any]:
    """Return the types of a union and the ranges around them."""
    if get_origin(hint) is Annotated:
        return [*_members(hint.__origin__), *(item for item in hint.__metadata__ if isinstance(item, Range))]
    in_union = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return [member for each in in_union for member in _members(each)] or [hint]


def check_ranges(cls: type, owner: str, **options: Any) -> None:
    """Validate options that replace those of a data class, by the ranges in its annotations.

    Raises:
        ConfigurationError: a value lies outside.
    """
    for name, value in options.items():
        for each in _kinds(cls)[name].ranges:
            each.check(owner, **{name: value})


def ranges_of(cls: type) -> dict[str, str]:
    """Return the ranges of a class's arguments in words, by name; those of settings inside it by names with dots.

    >>> from mrlm_pl.losses import Clip
    >>> ranges_of(Clip)["low"]
    'above 0 and at most 1'
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        kinds = _kinds(base if dataclasses.is_dataclass(base) else base.__init__)  # type: ignore[misc]
        found = {name: text for name, text in found.items() if name.partition(".")[0] not in kinds}
        for name, kind in kinds.items():
            for each in kind.ranges:
                found[name] = each.text
            settings = [each for each in kind.types if isinstance(each, type) and dataclasses.is_dataclass(each)]
            found |= {f"{name}.{inner}": text for each in settings for inner, text in ranges_of(each).items()}
    return found


def plain(value: Any) -> Any:
    """Return the Python number in a scalar of NumPy or torch, and any other value as it is.

    >>> import numpy
    >>> plain(numpy.float64(0.5)), plain(numpy.int64(3)), plain("text")
    (0.5, 3, 'text')
    """
    is_scalar = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar and not getattr(value, "requires_grad", False) else value


def check_known(
    options: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], owner: Callable[..., Any]
) -> None:
    """Validate that options are among the parameters of a call for ``owner``, a class or function.

    Raises:
        TypeError: an option is not among them; the message names the nearest.
    """
    if not options.keys() <= parameters.keys():
        unknown = next(name for name in options if name not in parameters)
        named: dict[str, inspect.Parameter] = {}
        for call in [cls.__init__ for cls in getattr(owner, "__mro__", ()) if "__init__" in vars(cls)] or [owner]:
            named |= (taken := inspect.signature(call).parameters)
            if taken == parameters:  # further ones are not passed on
                break
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = [name for name, each in named.items() if each.kind in by_name and name != "self"]
        hint = did_you_mean(unknown, names, f"it accepts: {', '.join(names)}")
        raise TypeError(f"{owner.__name__} has no {unknown!r}; {hint}")


class _SettingsType(ABCMeta):
    """Checks the constructors that data classes get, which they have only after ``__init_subclass__``."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, check_arguments(value) if name == "__init__" else value)


@dataclasses.dataclass(frozen=True)
class Settings(metaclass=_SettingsType):
    """Base of the data classes of settings, which check their arguments; see :func:`check_arguments`."""


class ChecksArguments:
    """Base of classes whose constructors check their arguments; see :func:`check_arguments`."""

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__init__" in vars(cls):
            cls.__init__ = check_arguments(cls.__init__)  # type: ignore[method-assign]


def check_instance(cls: type | tuple[type, ...], value: Any, name: str, kind: str) -> None:
    """Validate that a value is an instance of a class.

    Args:
        cls: expected class, or several.
        value: value to check.
        name: name of the setting, for messages.
        kind: kind of the instances, in words, with its article.

    Raises:
        ConfigurationError: the value is not an instance, or is the class instead of one.

    >>> check_instance(float, float, "rate", "a number")
    Traceback (most recent call last):
    mrlm_pl.errors.ConfigurationError: rate: <class 'float'> is not a number; call it: float()
    """
    if not isinstance(value, cls):
        remedy = f"call it: {value.__name__}()" if isinstance(value, type) else "give an instance of its class"
        raise ConfigurationError(f"{name}: {value!r:.80} is not {kind}; {remedy}")


def not_all_zero(owner: str = "", **options: Any) -> None:
    """Validate that a weight, or one of a mapping of weights, is not 0; without any there is nothing to learn from.

    Raises:
        ConfigurationError: all are 0.
    """
    weights = [
        weight for value in options.values() for weight in (value.values() if isinstance(value, Mapping) else [value])
    ]
    if not any(weights):
        raise ConfigurationError(f"{owner}all of {', '.join(options)} are 0, so that nothing is learned; raise one")


def one_of(choices: Collection[Any], owner: str = "", **options: Any) -> None:
    """Validate that options are among the choices; None is an option that is not set.

    Raises:
        ConfigurationError: a value is not among the choices.
    """
    for name, value in options.items():
        if value is not None and value not in [*choices]:  # equality alone: a value may not be a key
            hint = did_you_mean(str(value), list(map(str, choices)), f"choose from {', '.join(map(str, choices))}")
            raise ConfigurationError(f"{owner}{name} is {value!r}; {hint}")


def some_of(choices: Sequence[T], owner: str, **option: Sequence[T] | None) -> tuple[T, ...]:
    """Return the chosen values of an option, all of the choices for None.

    Raises:
        ConfigurationError: the list is empty or holds another value.

    >>> some_of(["a", "b"], "math: ", kinds=["b"]), some_of(["a", "b"], "math: ", kinds=None)
    (('b',), ('a', 'b'))
    """
    ((name, chosen),) = option.items()
    if chosen is not None and (not chosen or any(value not in choices for value in chosen)):
        raise ConfigurationError(f"{owner}{name} is {chosen!r}; choose from {', '.join(map(str, choices))}")
    return tuple(choices if chosen is None else chosen)


def whole_range(low: int, high: int, owner: str, **option: Sequence[int]) -> tuple[int, int]:
    """Return an option of the form [lowest, highest] as a pair.

    Raises:
        ConfigurationError: it is no such pair within ``low`` and ``high``.

    >>> whole_range(1, 5, "math: ", difficulty=[1, 3])
    (1, 3)
    """
    ((name, value),) = option.items()
    pair = tuple(value) if isinstance(value, Sequence) else ()
    if len(pair) != 2 or not low <= pair[0] <= pair[1] <= high:
        raise ConfigurationError(f"{owner}{name} is {value!r}; give [lowest, highest] from {low} to {high}")
    return pair[0], pair[1]


def check_address(target: str, owner: str = "") -> None:
    """Validate the address of a server.

    Args:
        target: address of the server.
        owner: prefix of the message.

    Raises:
        ConfigurationError: it is not ``HOST:PORT``.
    """
    host, _, port = target.rpartition(":")
    of_http = target.startswith(("http://", "https://"))
    if of_http or not (host and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ConfigurationError(
            f"{owner}the address {target!r} is not HOST:PORT with a port of 1 to 65535, such as 127.0.0.1:50051"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is one of this machine that no other machine reaches.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("::1")
    (True, True, False, True)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_served_by(place: str, owner: str) -> None:
    """Validate the server of a policy, ``served_by``.

    Args:
        place: ``HOST:PORT`` or ``[DIALECT+]http[s]://HOST:PORT``.
        owner: prefix of the message.

    Raises:
        ConfigurationError: it is neither.
    """
    if "://" not in place:
        check_address(place, f"{owner}served_by: ")
    elif not place.removeprefix("sglang+").removeprefix("transformers+").startswith(("http://", "https://")):
        raise ConfigurationError(
            f"{owner}served_by {place!r} is neither HOST:PORT, nor http://HOST:PORT (vLLM), sglang+http://HOST:PORT or "
            "transformers+http://HOST:PORT"
        )
