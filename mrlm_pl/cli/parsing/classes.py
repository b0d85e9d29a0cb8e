"""Names of classes and keys of settings in a configuration, checked against the signatures of the classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser

from mrlm_pl.cli.parsing.config_files import OWN_CLASS, MistakeError, unknown_key
from mrlm_pl.cli.parsing.configuration import ARGUMENTS, CLASS, DROPPED, EARLIER, leaves
from mrlm_pl.cli.parsing.parameter_types import (
    KINDS,
    classes_among,
    factory_classes,
    inner_type,
    is_plain,
    literal_values,
    members_of,
    takes_functions,
    type_name,
)
from mrlm_pl.environment import Environment
from mrlm_pl.errors import MRLMError, did_you_mean, nearest, nearest_path, source_line_of_class, tell
from mrlm_pl.runs.plugins import (
    class_path,
    defaults,
    dotted_path,
    environments_by_name,
    import_exports,
    imported,
    is_offered,
    is_usable,
    plugin_functions,
    subclasses,
)

MOST_NAMES = 40
"""A message with the nearest name lists all names only up to this number."""

LOSS = ("loss", "loss_settings", "clip")
"""Arguments of a policy gradient that one with its own loss rejects."""

STRATEGIES = {"ddp": "lightning.pytorch.strategies.DDPStrategy", "fsdp": "mrlm_pl.trainer.fsdp.FSDP"}
"""Classes of the trainer's strategies that take arguments, by their names in Lightning."""

_OWN_PACKAGES = ("mrlm_pl.", "mrlm_environments.", "mrlm_callbacks.")


def resolve(value: Any, annotation: Any, key: str) -> Any:
    """Return a value with the import paths of its classes, after a check of the names in it.

    Args:
        value: value in the form that :func:`~mrlm_pl.cli.parsing.configuration.merge_arguments` returns.
        annotation: type of the parameter.
        key: key of the value, for messages.

    Raises:
        MistakeError: a class or a setting does not exist.
    """
    members = members_of(annotation)
    classes = classes_among(members)
    settings = next((cls for cls in classes if is_dataclass(cls) or getattr(cls, "__final__", False)), None)
    named = isinstance(value, Mapping) and CLASS in value
    bases = [cls for cls in classes if cls is not settings]
    bases = bases or (factory_classes(members) if named or isinstance(value, str) else [])
    is_policy = settings is not None and settings.__name__ == "Policy"
    if isinstance(value, Mapping) and EARLIER in value and not (bases or is_policy):
        value = value[CLASS]  # a text instead of a mapping, which names no class
    if isinstance(value, list):
        return [resolve(item, inner_type(members, mapping=False), key) for item in value]
    if isinstance(value, str) and takes_functions(members) and (path := _function_path(value, members, key)):
        return path
    named = isinstance(value, Mapping) and CLASS in value  # a text may have taken its place
    if named and (classes or bases):
        _check_beside(value, key)
    if settings is not None and is_policy and (named or isinstance(value, str)):
        value = {"model": value[CLASS], **(value.get(ARGUMENTS) or {})} if named else {"model": value}
    elif bases and (named or isinstance(value, str)):
        return _resolve_class(value if named else {CLASS: value}, bases, members, key)
    if isinstance(value, Mapping):
        inner = inner_type(members, mapping=True)
        if inner is not Any:
            return {name: resolve(item, inner, f"{key}.{name}") for name, item in value.items()}
        if bases:
            name = next(iter(value.get(ARGUMENTS) or value), "")
            fault = f"no {bases[0].__name__} is named" + (f" that has {name!r}" if name else "")
            raise MistakeError(f"{key}.{name}".rstrip("."), f"{fault}; name its class first, as in `--{key} CLASS`")
        return value if settings is None else resolve_arguments(value, settings, key)
    optional = type(None) in members
    if settings is not None and not bases and not (value is None and optional) and not is_plain(value, members):
        names, shown = list(parameters(settings)), "null" if value is None else repr(value)
        expected = f"settings of {settings.__name__} ({', '.join(names)})"
        remedy = f"name them, as in `{{{names[0]}: VALUE}}` or `--{key}.{names[0]} VALUE`"
        raise MistakeError(key, f"expected {expected}, but the value is {shown}; {remedy}")
    return value


def _check_beside(value: Mapping[str, Any], key: str) -> None:
    """Reject arguments of a class beside its ``class_path``.

    Raises:
        MistakeError: there is such an argument; the error is that of the first.
    """
    misplaced = next((name for name in value if name not in (CLASS, ARGUMENTS, "dict_kwargs", EARLIER, DROPPED)), None)
    if misplaced is not None and isinstance(value[misplaced], Mapping) and nearest(misplaced, [ARGUMENTS]):
        raise MistakeError(f"{key}.{misplaced}", f"a class has no {misplaced!r}; did you mean {ARGUMENTS!r}?")
    if misplaced is not None:
        example = f"{{{CLASS}: {value[CLASS]}, {ARGUMENTS}: {{{misplaced}: VALUE}}}}"
        raise MistakeError(f"{key}.{misplaced}", f"put `{misplaced}` under `{ARGUMENTS}`, as in `{example}`")


def _function_path(name: str, members: Sequence[Any], key: str) -> str | None:
    """Return the import path of a function by that path, as ``./my_file.py:my_function``, or by its name in a plugin.

    None for a name that is another value of the parameter, or may be a class.
    """
    path = dotted_path(name)
    if "." in path:
        function = _import(path, name, key)
        if not callable(function):
            raise MistakeError(key, f"{path} is a {type(function).__name__}, and not a function")
        return path
    if name in literal_values(members):
        return None
    paths = [*plugin_functions(name)]
    if len(paths) > 1:
        raise MistakeError(key, f"several functions are named {name!r}; give the path of one: {', '.join(paths)}")
    if not paths and not is_plain(name, members) and not factory_classes(members):
        near = nearest(name, map(_last_name, plugin_functions()))
        hint = f"did you mean {near!r}? Otherwise give" if near else "give"
        remedy = f"{hint} its import path, as in `my_module.my_function` or `./my_file.py:my_function`"
        raise MistakeError(key, f"no plugin exports a function {name!r}; {remedy}")
    return next(iter(paths), None)


def _last_name(path: str) -> str:
    return path.rpartition(".")[2]


def _import(path: str, name: str, key: str) -> Any:
    try:
        return imported(path)
    except ImportError as error:
        raise MistakeError(key, f"{error} (the value is {name!r})") from error


def resolve_arguments(arguments: Mapping[str, Any], cls: type, key: str) -> dict[str, Any]:
    """Return the arguments of a class, each of them resolved by :func:`resolve`.

    Raises:
        MistakeError: the class has no such argument.
    """
    type_hints = parameters(cls)
    resolved: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in type_hints:
            raise MistakeError(f"{key}.{name}", unknown_key(cls.__name__, name, accepted_arguments(cls)))
        if type_hints[name] is inspect.Parameter.empty and isinstance(value, Mapping):
            inner, _ = next(leaves(value, f"{key}.{name}"))
            fault = f"the parameter {name!r} of {cls.__name__} has no type hint, so its settings are unknown"
            remedy = f"annotate it, as in `{name}: dict[str, Policy] | None = None`{source_line_of_class(cls)}"
            raise MistakeError(inner, f"{fault}; {remedy}")
        resolved[name] = resolve(value, type_hints[name], f"{key}.{name}")
    return resolved


def find_mistake(value: Any, annotation: Any, key: str) -> MistakeError | None:
    """Return the mistake of the first value that its parameter does not take, or None; call :func:`resolve` before."""
    members = members_of(annotation)
    named = isinstance(value, Mapping) and CLASS in value
    settings = next(iter(classes_among(members)), None)
    if isinstance(value, list) and (inner := inner_type(members, mapping=False)) is not Any:
        mistakes = [find_mistake(item, inner, key) for item in value]
    elif isinstance(value, Mapping) and (inner := inner_type(members, mapping=True)) is not Any:
        mistakes = [find_mistake(item, inner, f"{key}.{name}") for name, item in value.items()]
    elif isinstance(value, Mapping) and settings is not None:
        cls = imported(value[CLASS]) if named else settings
        arguments = (value.get(ARGUMENTS) or {}) if named else value
        type_hints = parameters(cls)
        mistakes = [
            find_mistake(item, type_hints[name], f"{key}.{name}")
            for name, item in arguments.items()
            if name in type_hints
        ]
        signature = inspect.signature(cls).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [item.name for item in signature if item.default is item.empty and item.kind not in variadic]
        missing = [name for name in required if name not in arguments]
        if missing and not any(mistakes):
            remedy = f"give it as `--{key}.{missing[0]} VALUE`"
            return MistakeError(key, f"{cls.__name__} needs {', '.join(missing)}; {remedy}")
        if not arguments and is_dataclass(cls):
            try:
                cls()
            except MRLMError as error:  # the parser library does not show it
                return MistakeError(key, str(error).removeprefix(f"{key.partition('.')[2]}: "))
    else:
        mistakes = [_value_mistake(value, annotation, key)]
    return next(filter(None, mistakes), None)


def _value_mistake(value: Any, annotation: Any, key: str) -> MistakeError | None:
    """Return the fault of a plain value: the types and the choices that the parameter has."""
    parser = ArgumentParser(exit_on_error=False)
    if annotation in (Any, inspect.Parameter.empty):
        return None
    try:
        parser.add_argument("--value", type=annotation)
        parser.parse_object({"value": value})
    except ArgumentError as error:
        members = [member for member in members_of(annotation) if member is not type(None)]
        numbers = len(members) == 1 and getattr(members[0], "__module__", "") == "jsonargparse.typing"
        if numbers and members[0] is not annotation:  # optional
            return _value_mistake(value, members[0], key)
        choices = literal_values(members)
        kinds = [type_name(member) for member in members if get_origin(member) is not Literal]
        if numbers:
            reason = plain_reason(
                str(error).strip().rpartition("\n")[2].partition(": ")[2], value
            )  # after the type's name
            near: object = nearest_path(Path(str(value))) if kinds[0].startswith("Path") else None
        else:
            expected = " or ".join([*kinds, *([f"one of {', '.join(map(repr, choices))}"] if choices else [])])
            functions = map(_last_name, plugin_functions()) if takes_functions(members) else ()
            near = nearest(str(value), [*map(str, choices), *functions])
            reason = f"expected {expected}, but the value is {value!r}"
            if kinds == ["list"] and isinstance(value, str) and not value.startswith("["):
                reason += f"; write a list, as in `[{value}]`"
        return MistakeError(key, reason + (f"; did you mean {str(near)!r}?" if near else ""))
    return None


def plain_reason(reason: str, value: Any) -> str:
    """Return the parser library's reason against a number in plain words; another reason as it is.

    >>> plain_reason("-4 does not conform to restriction v>=0 and v<=9", -4)
    'expected a number >= 0 and <= 9, but the value is -4'
    >>> plain_reason("invalid literal for int() with base 10: 'abc'", "abc")
    "expected an integer such as 2, but the value is 'abc'"
    >>> plain_reason("float() argument must be a ...", {})
    'expected a number such as 0.5, but the value is {}'
    """
    number, restricted, bounds = reason.partition(" does not conform to restriction ")
    if restricted:
        bounds = re.sub(r"v([<>]=?)", r"\1 ", bounds)
        return f"expected a number {bounds}, but the value is {number}"
    kinds = {
        ("invalid literal for int() with base 10: ", "int() argument must be "): KINDS[int],
        ("could not convert string to float: ", "float() argument must be "): KINDS[float],
    }
    for beginnings, kind in kinds.items():
        if reason.startswith(beginnings):
            return f"expected {kind}, but the value is {value!r}"
    return reason


@cache
def parameters(cls: type) -> dict[str, Any]:
    """Return the annotations of the arguments of a class, by name, those that it passes to its bases included."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if "__init__" in vars(base):
            signature = inspect.signature(base.__init__).parameters  # type: ignore[misc]
            try:
                typed = get_type_hints(base.__init__)  # type: ignore[misc]
            except NameError:  # a name that only type checkers import: its values are left to the parser
                typed = {}
            untyped = {name: item.empty if item.annotation is item.empty else Any for name, item in signature.items()}
            hints |= {**untyped, **typed}
            hints |= {
                name: hints[name] | None for name in typed if name in signature and signature[name].default is None
            }
    names = ArgumentParser(exit_on_error=False).add_class_arguments(cls, fail_untyped=False)
    return {name: hints.get(name, Any) for name in names}


def accepted_arguments(cls: type) -> list[str]:
    """Return the names of the arguments of a class without those of a loss that its own ``token_losses`` replaces."""
    names = list(parameters(cls))
    if not set(LOSS) <= set(names):
        return names
    from mrlm_pl.learner.policy_gradient import PolicyGradient

    owner: Any = cls if issubclass(cls, PolicyGradient) else PolicyGradient
    replaced = owner.token_losses is not PolicyGradient.token_losses and owner.uses_loss is PolicyGradient.uses_loss
    return [name for name in names if not (replaced and name in LOSS)]


def named_class(name: str, bases: Sequence[type], key: str) -> Any:
    """Return the class of a short name, a class name or a path; None for an unknown name.

    Raises:
        MistakeError: a path leads to no usable class, or a name to several.
    """
    path = dotted_path(name)
    if "." in path:
        cls = _import(path, name, key)
        if missing := sorted(getattr(cls, "__abstractmethods__", ())):
            lacking = ", ".join(missing)
            raise MistakeError(key, f"{path} does not define {lacking}; define it{source_line_of_class(cls)}")
        if not isinstance(cls, type):
            raise MistakeError(key, f"{path} is a {type(cls).__name__}, not a class")
        return cls
    import_exports(name)
    usable = _classes_named(name, bases)
    is_environment = any(issubclass(base, Environment) for base in bases)
    if not usable and is_environment and name in (short := environments_by_name()):
        return short[name]
    if not usable:
        import_exports()  # which may bring classes that no package exports
        usable = _classes_named(name, bases)
    if len(usable) > 1:
        raise MistakeError(key, f"several classes are named {name!r}; give the path of one: {', '.join(usable)}")
    return next(iter(usable.values()), None)


def help_class_path(key: str, name: str, base: type, config: dict[str, Any]) -> str:
    """Return the import path of the class whose help is asked for.

    Args:
        key: a group, or a parameter of its class, such as ``data.environment``.
        name: name of the class.
        base: base class of the group.
        config: resolved configuration; if it names no class of the group, it receives the first class with such a
            parameter.

    Raises:
        MistakeError: there is no such class, or no class is named there.
    """
    group, _, argument = key.partition(".")
    bases, owner = [base], base
    if argument:
        class_name = group_config.get(CLASS) if isinstance(group_config := config.get(group), Mapping) else None
        owners = (cls for cls in _usable_classes(base) if argument in parameters(cls))
        owner = imported(class_name) if class_name else next(owners, base)
        if owner is not base:
            config.setdefault(group, {CLASS: class_path(owner)})
        members = members_of(parameters(owner).get(argument))
        classes = classes_among([*members, *members_of(inner_type(members, mapping=False))])
        bases = [cls for cls in classes if not (is_dataclass(cls) or getattr(cls, "__final__", False))]
    if not bases and argument.partition(".")[0] not in parameters(owner):
        raise MistakeError(key, f"{owner.__name__} has no {argument!r}")
    if not bases:
        raise MistakeError(key, f"no class is named there; see `--{group}.help {owner.__name__}`")
    cls = named_class(name, bases, key)
    if cls is None:
        raise MistakeError(key, unknown_name(name, bases))
    return f"{cls.__module__}.{cls.__qualname__}"


def _classes_named(name: str, bases: Sequence[type]) -> dict[str, type]:
    """Return the imported classes of a name, by their paths."""
    return {class_path(cls): cls for base in bases for cls in _usable_classes(base) if cls.__name__ == name}


def _resolve_class(value: Mapping[str, Any], bases: Sequence[type], members: Sequence[Any], key: str) -> Any:
    name, arguments = str(value[CLASS]), dict(value.get(ARGUMENTS) or {})
    cls: Any = None
    try:
        cls = named_class(STRATEGIES.get(name, name) if arguments else name, bases, key)
    except MistakeError:
        if arguments or not is_plain(name, members):
            raise
    if cls is None and is_plain(name, members) and not arguments:
        return name
    if cls is None:
        raise MistakeError(key, unknown_name(name, bases))
    ignored: list[str] = []
    dropped: list[str] = []
    refused: dict[str, tuple[Any, type]] = {}
    for argument, earlier in value.get(EARLIER, {}).items():
        old = cls if earlier is None else named_class(earlier, bases, key)
        if argument not in arguments or old is cls or _fits(arguments[argument], argument, cls, key):
            continue
        setting = arguments.pop(argument)
        if setting == defaults(old).get(argument):
            ignored.append(argument)
        elif value.get(DROPPED) is not None:
            dropped.append(argument)
        else:
            refused[argument] = setting, old
    if refused:
        first, *others = refused
        raise MistakeError(f"{key}.{first}", _unaccepted_message(first, *refused[first], cls, key, others))
    if ignored:
        names = ", ".join(ignored)
        tell(f"{cls.__name__} does not take {names}: ignored, as they have {old.__name__}'s defaults")
    if dropped and value[DROPPED]:
        tell(f"{cls.__name__} does not take {', '.join(dropped)}, set for {old.__name__}: dropped")
    rest = {name: item for name, item in value.items() if name not in (EARLIER, DROPPED, ARGUMENTS)}
    inner = {ARGUMENTS: resolve_arguments(arguments, cls, key)} if arguments and isinstance(cls, type) else {}
    return {**rest, CLASS: class_path(cls) if isinstance(cls, type) else name, **inner}


def _fits(value: Any, argument: str, cls: type, key: str) -> bool:
    """Return whether a class takes a value for an argument."""
    type_hints = parameters(cls)
    if argument not in accepted_arguments(cls):
        return False
    if type_hints[argument] is inspect.Parameter.empty:
        return True  # the check of its settings asks for the type hint
    try:
        return find_mistake(resolve_arguments({argument: value}, cls, key)[argument], type_hints[argument], key) is None
    except MistakeError:
        return False


def _unaccepted_message(argument: str, setting: Any, old: type, new: type, key: str, others: Sequence[str] = ()) -> str:
    type_hints = parameters(new)
    shown = setting[CLASS] if isinstance(setting, Mapping) and CLASS in setting else repr(setting)
    if argument in type_hints:
        fault = f"{new.__name__} does not accept {shown}, which was set for {old.__name__}"
    else:
        fault = (
            f"{unknown_key(new.__name__, argument, accepted_arguments(new))}; it was set to {shown} for {old.__name__}"
        )
    if others:
        fault += f"; nor does it take the settings of {', '.join(others)}"
    path = class_path(new)
    named = new.__name__ if path.startswith(_OWN_PACKAGES) else path  # other classes are found by their path alone
    removed = "them" if others else "it"
    return (
        f"{fault}; remove {removed}, or drop what {new.__name__} does not take of {old.__name__}'s settings with "
        f"`init_args: {{}}` beside its class_path in a file, or `--{key} '{{class_path: {named}, init_args: {{}}}}'`"
    )


def unknown_name(name: str, bases: Sequence[type]) -> str:
    """Return the message for a name that no class has, with the nearest; for an empty name all names."""
    base = bases[0]
    # Lightning's bases are concrete, and do nothing.
    offered = [
        cls for cls in _usable_classes(base) if is_offered(cls) and not (cls is base and "lightning" in cls.__module__)
    ]
    classes = [cls.__name__ for cls in offered]
    known_names = sorted(environments_by_name() if issubclass(base, Environment) else classes, key=str.lower)
    near = nearest(name, [*known_names, *classes])
    listed = "" if near and len(known_names) > MOST_NAMES else f"known are: {', '.join(known_names)}; "
    hint = did_you_mean(name, [near] if near else [], listed + OWN_CLASS)
    kind = re.sub(r"\B(?=[A-Z][a-z])", " ", base.__name__.removeprefix("Lightning")).lower()  # "data module"
    return f"there is no {kind} {name!r}; {hint}" if name else f"name one: {kind}s are {', '.join(known_names)}"


def _usable_classes(base: type) -> list[type]:
    """Return the concrete public classes below a base that have been imported, and the base itself."""
    return [cls for cls in (base, *subclasses(base)) if is_usable(cls)]
