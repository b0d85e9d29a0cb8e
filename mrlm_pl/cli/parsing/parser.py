"""A parser that answers a mistake in one short message: the key, the value, the nearest valid name."""

from __future__ import annotations

import argparse
import importlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace
from jsonargparse._parameter_resolvers import get_signature_parameters
from jsonargparse._typehints import NestedArg

from mrlm_pl.cli.parsing.class_change import lost_settings, option_key, refuse_lost
from mrlm_pl.cli.parsing.class_names import UnknownName, short_class_names
from mrlm_pl.cli.parsing.config_files import check_files, config_files, place_of_key
from mrlm_pl.errors import DEBUG_VARIABLE, ConfigurationError, MRLMError, nearest, place_of, place_of_error
from mrlm_pl.runs.plugins import imported

_NOISE = re.compile(
    r"Does not validate against any|Subtypes: |Errors:$|Given value|Subclass types expect|- a (class path|dict)|"
    r"Expected a <class 'NoneType'>|Expected a path but|Not a valid subclass of"
)
_KEY = re.compile(r'Parser key "([^"]+)":\s*(.*)')
_CLASS = re.compile(r"Problem with given class_path '([^']+)':\s*(.*)")
_OPTIONS = (
    re.compile(r"Option '(?P<key>[^']+)' is not accepted"),
    re.compile(r"unrecognized arguments: --(?P<key>[^= ]+)"),
    re.compile(r"Group '(?P<group>[^']+)' does not accept option '(?P<key>[^']+)'"),
)
_SUBCOMMAND_OPTION = re.compile(r"Subcommand '([^']+)' does not accept option '([^']+)'")
_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.+)' \(choose from (.+)\)$")
_ONE_OF = re.compile(r"Expected a typing\.Literal\[(.+)\]\. Got value: (.+)$")
_NO_FILE = re.compile(r"File does not exist: '(.+)'$")
_ROLE = re.compile(r":[a-z]+:`(?:~(?:\w+\.)*)?([\w.]+)`")
_CLASS_HELP = re.compile(r"^Help for --", re.MULTILINE)
_INNER_HELP = re.compile(r"^  --\S+\.help\n(?: {20,}.*\n)+", re.MULTILINE)  # those of groups; classes take a value
_NOT_A_PATH = "Expected a dot import path string: "


class ShortErrors:
    """Mixin of a ``jsonargparse`` parser: mistakes raise :class:`ConfigurationError` with a short message.

    Short names of environments are resolved while arguments are parsed.
    """

    _unknown: list[UnknownName]
    _files: list[Path]
    _options: list[str]

    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """The namespace of the arguments.

        Raises:
            ConfigurationError: the arguments or a configuration file hold a mistake.
        """
        given = args[0] if args else kwargs.get("args")
        ShortErrors._files = config_files(given) if isinstance(given, list) else []
        ShortErrors._options = [word for word in given if word.startswith("--")] if isinstance(given, list) else []
        check_files(ShortErrors._files)
        with short_class_names() as ShortErrors._unknown, lost_settings() as lost:
            parsed = super().parse_args(*args, **kwargs)  # type: ignore[misc]
        refuse_lost(lost, parsed)
        refuse_plain_groups(parsed)
        return parsed

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """The namespace with its classes built.

        Raises:
            MRLMError: a class refused its arguments. The library hides such an error among those of the other types
                that the value might have had.
        """
        refusals: list[MRLMError] = []

        def build(cls: type, *arguments: Any, **options: Any) -> Any:
            try:
                return cls(*arguments, **options)
            except MRLMError as error:
                refusals.append(error)
                raise
            except Exception as error:  # a class of the user's may fail in any way
                if cls.__module__.partition(".")[0] in ("lightning", "torch"):  # whose errors Lightning's own CLI knows
                    raise
                found = place_of_error(error)
                where = f" ({found})" if found else f"; for its traceback set {DEBUG_VARIABLE}=1"
                text = f"{cls.__name__} cannot be made: {type(error).__name__}: {error}{where}"
                refused = ConfigurationError(" ".join(text.split()))
                refused.__cause__ = error
                refusals.append(refused)
                raise

        try:
            return super().instantiate(*args, instantiators=[(build, object, True)], **kwargs)  # type: ignore[misc]
        except ValueError as error:
            cause = error.__cause__
            if isinstance(cause, MRLMError):
                refusals.append(cause)
            if refusals:
                raise refusals[0] from refusals[0].__cause__
            raise

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what explains a mistake; parsers of nested classes raise the library's own exception.

        Raises:
            ConfigurationError: always, on a parser of the command line.
        """
        if not self.exit_on_error:  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        text = explain(message, self, ShortErrors._unknown)
        key = text.partition(":")[0]
        by_option = any(word.replace(".init_args", "").startswith(f"--{key}") for word in ShortErrors._options)
        place = place_of_key(key, ShortErrors._files) if " " not in key and not by_option else ""
        raise ConfigurationError(f"{text} ({place})" if place else text) from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """The help in plain words, without the options of a class's help that the command line does not take."""
        text = plain_words(super().format_help(*args, **kwargs))  # type: ignore[misc]
        if not _CLASS_HELP.search(text):
            return text
        text = _INNER_HELP.sub("", text)
        return text + policy_help() if "--model.policies" in text else text


def policy_help() -> str:
    """The settings of a policy, for the help of an algorithm."""
    from mrlm_pl.policy import Policy

    lines = ["", "settings of each policy, in a file under `policies: {NAME: ...}`:"]
    for parameter in get_signature_parameters(Policy, None):
        default = "" if parameter.default is None else f" (default: {parameter.default})"
        lines.append(f"  --model.policies.NAME.{parameter.name} {parameter.name.upper()}")
        lines += textwrap.wrap(
            f"{plain_words(parameter.doc or '')}{default}", 96, initial_indent=" " * 24, subsequent_indent=" " * 24
        )
    return "\n".join(lines) + "\n"


def refuse_plain_groups(parsed: Any) -> None:
    """Refuse what the parser library lets through: a plain value for settings, settings of an unannotated parameter.

    Raises:
        ConfigurationError: key, value and what is expected.
    """
    for key, value in list(parsed.items(branches=True)):
        if not (key.endswith("init_args") and isinstance(value, Namespace)):
            continue
        cls = imported(parsed[key.removesuffix("init_args") + "class_path"])
        annotations = {item.name: item.annotation for item in get_signature_parameters(cls, None)}
        for name, given in value.items(branches=True, nested=False):
            wanted = annotations.get(name)
            if isinstance(given, NestedArg):
                place = _joined(option_key(key.removesuffix(".init_args")), f"{name}.{given.key}")
                raise ConfigurationError(
                    f"{place}: the parameter {name!r} of {cls.__name__} has no type hint, so its settings are unknown; "
                    f"annotate it, as in `{name}: dict[str, Policy] | None = None`{place_of(cls)}"
                )
            if is_dataclass(wanted) and not isinstance(given, (Namespace, Mapping, wanted)):  # type: ignore[arg-type]
                place = _joined(option_key(key.removesuffix(".init_args")), name)
                names = [item.name for item in fields(wanted)]
                raise ConfigurationError(
                    f"{place}: expected settings of {wanted.__name__} ({', '.join(names)}), but the value is {given!r}"  # type: ignore[union-attr]
                )


def plain_words(text: str) -> str:
    """The text of a docstring without its markup of names.

    >>> plain_words("see :class:`~mrlm_pl.rollout.cross_policy.CrossPolicy` and ``mode``")
    'see CrossPolicy and `mode`'
    """
    return _ROLE.sub(r"\1", text).replace("``", "`")


class CommandParser(ShortErrors, ArgumentParser):
    """The parser of the commands that need no Lightning."""


@dataclass(frozen=True)
class _Finding:
    depth: int
    key: str
    class_path: str
    text: str


def explain(message: str, parser: Any, unknown: Sequence[UnknownName] = ()) -> str:
    """A short form of the parser library's message.

    Args:
        message: what the library says; a tree when a value may have several types.
        parser: whose options are compared with an unknown one.
        unknown: class names that were looked up in vain.
    """
    short = _unrecognized(message, parser) or _unaccepted_by_command(message, parser)
    if short:
        return short
    choice = _CHOICE.match(message)
    if choice:
        option, value, choices = choice.groups()
        names = [name.strip("'") for name in choices.split(", ")]
        return f"{option}: expected one of {', '.join(map(repr, names))}, but the value is {value}{_hint(value, names)}"
    required = re.match(r"the following arguments are required: (.+)", message)
    if required:
        keys = [re.sub(r"^(fit|validate|test|predict)\.", "", key) for key in required.group(1).split(", ")]
        return f"{', '.join(keys)} missing; give it as `--{keys[0]} VALUE` or in a file with `--config FILE`"
    findings = list(_findings(message))
    for finding in findings:
        required = re.match(r"the following arguments are required: (.+)", finding.text)
        if required and finding.class_path:
            name = finding.class_path.rsplit(".", 1)[1]
            return f"{finding.key}: {name} needs {required.group(1)}; give it as `--{finding.key}.ARGUMENT VALUE`"
    if not any(finding.key for finding in findings):
        return " ".join(message.split())
    for finding in findings:
        for pattern in _OPTIONS:
            match = pattern.match(finding.text)
            if match and finding.class_path:
                return _unknown_option(finding, ".".join(match.groupdict().values()))
    for finding in findings:
        if finding.text.startswith(_NOT_A_PATH):
            name = finding.text.removeprefix(_NOT_A_PATH)
            for item in reversed(unknown):
                if item.name == name:
                    return f"{finding.key}: {item.explain()}"
            told = _policy_value(finding)
            if told:
                return told
    return _wrong_value(message, findings)


def _findings(message: str) -> Iterator[_Finding]:
    """The lines of the library's tree that tell a cause, each with the key and class that it is about."""
    keys: list[tuple[int, str]] = []
    classes: list[tuple[int, str]] = []
    for line in message.splitlines():
        text = line.strip()
        if not text:
            continue
        depth = len(line) - len(line.lstrip())
        if text.startswith("- "):
            text, depth = text[2:], depth + 2
        keys = [item for item in keys if item[0] < depth]
        classes = [item for item in classes if item[0] < depth]
        match = _KEY.match(text)
        if match:
            keys.append((depth, match.group(1)))
            text, depth = match.group(2), depth + 1
        match = _CLASS.match(text)
        if match:
            classes.append((depth, match.group(1)))
            text, depth = match.group(2), depth + 1
        if text and not _NOISE.match(text):
            yield _Finding(depth, ".".join(key for _, key in keys), classes[-1][1] if classes else "", text)


def _unknown_option(finding: _Finding, option: str) -> str:
    module, name = finding.class_path.rsplit(".", 1)
    cls: type = getattr(importlib.import_module(module), name)
    key, *rest = option.split(".")
    while rest:
        inner = _settings_class(cls, key)
        if inner is None:
            break
        cls, (key, *rest) = inner, rest
    accepted = _parameters(cls)
    if not accepted:  # a setting for a class that the configuration does not name
        return f"{_joined(finding.key, option)}: no {cls.__name__} is named that has {key!r}; name its class first"
    near = nearest(key, accepted)
    hint = f"did you mean {near!r}? It" if near else "it"
    return f"{_joined(finding.key, option)}: {cls.__name__} has no {key!r}; {hint} accepts: {', '.join(accepted)}"


def _settings_class(cls: type, parameter: str) -> type | None:
    """The dataclass that a parameter of ``cls`` is annotated with, alone or as one of several types."""
    annotation = get_type_hints(cls.__init__).get(parameter)  # type: ignore[misc]
    candidates = (annotation, *get_args(annotation))
    return next((item for item in candidates if isinstance(item, type) and is_dataclass(item)), None)


def _policy_value(finding: _Finding) -> str | None:
    """What to write in place of a policy that is given as text alone."""
    if finding.key.rpartition(".")[2] not in ("policies", "critics"):
        return None
    model = finding.text.removeprefix(_NOT_A_PATH)
    return f"{finding.key}: a policy is a mapping of its settings; write `{{model: {model}}}` for {model!r}"


def _wrong_value(message: str, findings: Sequence[_Finding]) -> str:
    """Names the value and the types that would do, of the innermost key."""
    deepest = max(findings, key=lambda item: item.depth)
    same = [item.text for item in findings if item.key == deepest.key and item.depth == deepest.depth]
    same = [text for text in same if not text.startswith("Expected ")][:1] or same  # a cause is worth more than types
    wanted = list(dict.fromkeys(_readable(text) for text in same))
    value = re.findall(r"Given value: (.+)", message)
    given = ""
    if value and "Got value" not in deepest.text:
        nested = re.match(r"NestedArg\(key='[^']*', val=(.*)\)$", value[0])
        given = f" (the value is {nested.group(1) if nested else repr(value[0])})"
    key = _with_names(deepest.key, message)
    prefix = f"{key}: " if key else ""
    first, *others = wanted
    text = " or ".join([first, *(text.removeprefix("expected ") for text in others)])
    return f"{prefix}{text}{given}{_nearest_value(same[0])}"


def _with_names(key: str, message: str) -> str:
    """The key of a value, with the names in mappings, such as that of a policy, where an option gives them."""
    nested = re.findall(r"Given value: NestedArg\(key='([^']+)'", message)  # the outermost comes last
    group, _, name = key.partition(".")
    if not nested or name.rpartition(".")[2] != nested[-1].rpartition(".")[2]:
        return key
    return f"{group}.{nested[-1].removeprefix('init_args.')}"


def _nearest_value(text: str) -> str:
    """A hint at the nearest of the values, or of the files, that the library would take."""
    one_of, no_file = _ONE_OF.match(text), _NO_FILE.match(text)
    if one_of:
        return _hint(one_of.group(2), re.findall(r"'([^']+)'", one_of.group(1)))
    if no_file:
        path = Path(no_file.group(1))
        names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
        return _hint(path.name, names)
    return ""


def _hint(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def _readable(text: str) -> str:
    text = re.sub(r"<class '(?:[\w.]+\.)?(\w+)'>", r"\1", text)
    text = re.sub(r"typing\.Literal\[(.*?)\]", r"one of \1", text)
    text = re.sub(r'^Unable to load config "(.*)"$', "expected a mapping of settings, or a file that holds one", text)
    return re.sub(r"^Expected an? ", "expected ", text).replace(". Got value: ", ", but the value is ")


def _unrecognized(message: str, parser: Any) -> str | None:
    match = re.match(r"unrecognized arguments: (.+)", message, re.DOTALL)
    if not match:
        return None
    words = match.group(1).split()
    options = [word.split("=")[0] for word in words if word.startswith("-")]
    if not options:
        return f"{words[0]!r} is not expected here; values follow an option, as in `--option VALUE`"
    near = nearest(options[0].rstrip("+"), _options(parser))
    return f"there is no option {options[0]!r}" + (f"; did you mean {near!r}?" if near else "; see `--help`")


def _unaccepted_by_command(message: str, parser: Any) -> str | None:
    match = _SUBCOMMAND_OPTION.search(message)
    if not match:
        return None
    known = {option.lstrip("-") for option in _options(parser)}
    groups = {key.split(".")[0] for key in known}
    command, key = match.groups()
    group = key.split(".")[0]
    # A wrong group would pull the comparison of whole keys towards keys that look alike by chance.
    near = nearest(group, groups) if group not in groups else nearest(key, known)
    return f"{command} has no key {key!r}" + (f"; did you mean {near!r}?" if near else f"; see `mrlm {command} --help`")


def _options(parser: Any) -> list[str]:
    """All long options of a parser and of its sub-commands."""
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in dict.fromkeys(action.choices.values()):
                options += _options(child)
    return options


def _parameters(cls: type) -> list[str]:
    """Names of the parameters of a class, those that it passes on to its bases included."""
    return [parameter.name for parameter in get_signature_parameters(cls, None)]


def _joined(key: str, option: str) -> str:
    return f"{key}.{option}" if key else option
