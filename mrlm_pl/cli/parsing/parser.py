"""A parser that answers a mistake in one short message: the key, the value, the nearest valid name."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, NoReturn

from docstring_parser import parse
from jsonargparse import ActionConfigFile, ArgumentParser, get_loader, set_dumper, set_loader
from yaml import SafeDumper, YAMLError, dump

from mrlm_pl.cli.parsing.classes import (
    LOSS,
    accepted_arguments,
    find_mistake,
    help_class_path,
    plain_reason,
    resolve,
    resolve_arguments,
    unknown_name,
)
from mrlm_pl.cli.parsing.config_files import MistakeError, config_files, file_of_key, option_values
from mrlm_pl.cli.parsing.configuration import CLASS, leaves, load_value, merge_arguments
from mrlm_pl.cli.parsing.early_check import training_options
from mrlm_pl.cli.parsing.parameter_types import KINDS
from mrlm_pl.errors import DEBUG_VARIABLE, SYNONYMS, ConfigurationError, MRLMError, nearest, source_line_of_error
from mrlm_pl.grouping import unique
from mrlm_pl.runs.plugins import import_exports, imported
from mrlm_pl.runs.records.configuration_file import read_yaml
from mrlm_pl.settings import ranges_of

_UNACCEPTED = re.compile(r"(?:Group '([^']+)' does not accept option|Option) '([^']+)'")
_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*)' \(choose from (.+)\)$")
_KIND = re.compile(r"argument (\S+): invalid (int) value: '(.*)'$")
_OPTION_VALUE = re.compile(r'Parser key "([\w.]+)"(?: element \d+)?:')
_ITEM = re.compile(r'Parser key "([\w.]+)" element \d+:\s+Not of type \w+:\s+(.+)')
_ROLE = re.compile(r":[a-z]+:`(?:~(?:\w+\.)*)?([\w.]+)`")
_CLASS_HELP = re.compile(r"^Help for --(\S+)\.help=(\S+)", re.MULTILINE)
_OPTIONAL = re.compile(r"Optional\[(\w+)\]")
_SEE_CLASS = re.compile(r"see\s+:class:`~?([\w.]+\.\w+)`")
_INNER_HELP = re.compile(r"^  --\S+\.help\n(?: {20,}.*\n)+", re.MULTILINE)  # those of groups; classes take a value


_load_yaml = get_loader("yaml")


def _load(text: str) -> Any:
    """Return the value of a text in YAML, or in JSON, whose escapes of an emoji libyaml rejects."""
    if text.lstrip().startswith(("{", "[")):
        with suppress(ValueError):  # NaN and Infinity are texts in YAML
            return json.loads(text, parse_constant=_load_yaml, object_pairs_hook=unique)
        with suppress(YAMLError):  # of a text such as "{question} Reply with a number."
            read_yaml(text)  # rejects a key that is there twice
    return _load_yaml(text)


set_loader("yaml", _load, exceptions=(YAMLError,))


class _Dumper(SafeDumper):
    """Writes a text by its base class, such as Lightning's `Interval.step`, as text."""


_Dumper.add_multi_representer(str, lambda dumper, text: dumper.represent_str(str.__str__(text)))
set_dumper("yaml", lambda value: dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True))

_PARSED: ContextVar[tuple[Sequence[str], Mapping[str, Any], Mapping[str, type], str]] = ContextVar("parsed")
"""The words, configuration, base classes of the groups, and command that are being parsed."""

_REFUSALS: ContextVar[list[MRLMError] | None] = ContextVar("refusals", default=None)
"""Errors of the classes that are being built, with those inside them: the library loses errors of types in a union."""


class ShortErrors:
    """Mixin of a ``jsonargparse`` parser: mistakes raise :class:`ConfigurationError` with a short message."""

    def read(self, words: Sequence[str], bases: Mapping[str, type]) -> Any:
        """Return the namespace of options and configuration files.

        Args:
            words: words of the command line; options of a group are given as ``--GROUP.NAME VALUE``.
            bases: class of each group: a base whose subclasses may be named, or that of ``trainer`` or ``checkpoint``.

        Raises:
            ConfigurationError: the options or a configuration file hold a mistake.
        """
        config, other_words = merge_arguments(words, bases, get_loader("yaml"))
        parser_groups = {action.dest.partition(".")[0] for action in self._actions}  # type: ignore[attr-defined]
        empty = [key for key in config.keys() - parser_groups if all(value == {} for _, value in leaves(config[key]))]
        config |= dict.fromkeys(empty)  # the library ignores `{}`, and names a key with null
        try:
            for key, base in bases.items():
                value = config.get(key)
                fixed_class = key in ("trainer", "checkpoint")  # a class that is not named
                if value is not None and (not fixed_class or isinstance(value, Mapping)):
                    config[key] = resolve_arguments(value, base, key) if fixed_class else resolve(value, base, key)
            other_words = [
                part for word in other_words for part in (word.split("=", 1) if ".help=" in word else [word])
            ]
            if re.fullmatch(r"--(data|model)\..+\.help", other_words[-1] if other_words else ""):
                other_words.append("")  # which lists the names
            for index, word in enumerate(other_words[:-1]):
                key = word[2:].removesuffix(".help")
                if word.endswith(".help") and (group := key.partition(".")[0]) in bases:
                    other_words[index + 1] = help_class_path(key, other_words[index + 1], bases[group], config)
        except MistakeError as mistake:
            raise mistake.in_files(words) from mistake
        config_option = [f"--config={json.dumps(config, default=str)}"] if config else []
        token = _PARSED.set((words, config, bases, self.prog))
        try:
            return self.parse_args([*config_option, *other_words])  # type: ignore[attr-defined]
        finally:
            _PARSED.reset(token)

    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the namespace with its classes built.

        Raises:
            MRLMError: a class rejected its arguments; the library reports this error as one of a type mismatch.
        """
        outer = _REFUSALS.get()
        refusals: list[MRLMError] = [] if outer is None else outer

        def build(cls: type, *arguments: Any, **options: Any) -> Any:
            try:
                return cls(*arguments, **options)
            except MRLMError as error:
                name = find_policy(options, args[0].as_dict()) if cls.__name__ == "Policy" else None
                refusals.append(error if name is None else type(error)(f"policies.{name}: {error}"))
                refusals[-1].__cause__ = error.__cause__
                raise
            except Exception as error:  # a class of the user's may raise anything
                source_line = source_line_of_error(error)
                where = f" ({source_line})" if source_line else f"; for its traceback set {DEBUG_VARIABLE}=1"
                text = f"{cls.__name__} cannot be made: {type(error).__name__}: {error}{where}"
                refused = ConfigurationError(" ".join(text.split()))
                refused.__cause__ = error
                refusals.append(refused)
                raise

        token = _REFUSALS.set(refusals)
        try:
            return super().instantiate(*args, instantiators=[(build, object, True)], **kwargs)  # type: ignore[misc]
        except ValueError as error:
            cause = error.__cause__
            if isinstance(cause, MRLMError):
                refusals.append(cause)
            if refusals:
                raise refusals[0] from refusals[0].__cause__
            raise
        finally:
            _REFUSALS.reset(token)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise a short message; parsers of nested classes raise the library's own exception.

        Raises:
            ConfigurationError: always, on a parser of the command line.
        """
        if not self.exit_on_error:  # type: ignore[attr-defined]
            super().error(message, ex)  # type: ignore[misc]
        words, config, bases, _ = _PARSED.get(((), {}, {}, ""))
        for group, base in bases.items():
            if fault := find_mistake(config.get(group), base, group):
                raise fault.in_files(words) from ex
        if fault := _option_mistake(message, self, words):
            raise ConfigurationError(str(fault)) from ex
        text = explain(message, self)
        key = _unaccepted_key(message) or text.partition(":")[0]
        raise ConfigurationError(f"{text}{'' if ' ' in key else file_of_key(key, words)}") from ex

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help in plain words, without options that the command line does not take."""
        if class_help := _CLASS_HELP.search(self.description or ""):  # type: ignore[attr-defined]
            self.prog = _PARSED.get()[3]
            cls = imported(class_help[2])
            described = descriptions(cls)
            names, ranges = accepted_arguments(cls), ranges_of(cls)
            for action in self._actions:  # type: ignore[attr-defined]
                argument = action.dest.removeprefix(f"{class_help[1]}.")
                if action.help is None:
                    action.help = described.get(argument)
                if argument in ranges:
                    action.help = f"{action.help or ''} It must be {ranges[argument]}."
                if {argument.partition(".")[0]} & {*LOSS} - {*names}:
                    action.help = argparse.SUPPRESS
        for action in self._actions:  # type: ignore[attr-defined]
            if isinstance(action.help, str):  # before its lines are wrapped, in the middle of long names
                action.help = plain_words(action.help)
        text = plain_words(super().format_help(*args, **kwargs))  # type: ignore[misc]
        if not _CLASS_HELP.search(text):
            return text
        text = _INNER_HELP.sub("", text)
        return text + policy_help() if "--model.policies" in text else text


def find_policy(settings: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the name of an algorithm's first policy with these settings, as far as they are plain values."""
    for name, policy in (arguments.get("policies") or {}).items():
        given = policy.items() if isinstance(policy, Mapping) else ()
        if given and all(settings.get(key) == value for key, value in given if not isinstance(value, Mapping)):
            return str(name)
    return None


def descriptions(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's arguments by name, including those that its docstring describes together.

    For ``a, b: see :class:`X``` return those of ``X``, which the parser library does not follow.
    """
    described: dict[str, str] = {}
    for entry in parse(cls.__doc__ or "").params:
        names = entry.arg_name.split(", ")
        text = entry.description or ""
        owner = _SEE_CLASS.match(text)
        texts: dict[str, str | None] = {}
        with suppress(ImportError):  # a docstring may name a class by less than its path: then its own text is shown
            owner_parameters = parse(imported(owner[1]).__doc__ or "").params if owner else []
            texts = {item.arg_name: item.description for item in owner_parameters}
        described |= {name: texts.get(name) or text for name in names}
    return described


def policy_help() -> str:
    """Return the settings of a policy, for the help of an algorithm."""
    from mrlm_pl.policy import Policy

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Policy, "model.policies.NAME")
    _, prefix, options = parser.format_help().partition("  --model.policies.NAME.")
    return f"\nsettings of each policy, in a file under `policies: {{NAME: ...}}`:\n{plain_words(prefix + options)}"


def plain_words(text: str) -> str:
    """Return the text of a docstring or a type without markup of names.

    >>> plain_words("see :class:`~mrlm_pl.rollout.cross_policy.CrossPolicy` and ``mode`` (type: Optional[int])")
    'see CrossPolicy and `mode` (type: int | null)'
    """
    return _OPTIONAL.sub(r"\1 | null", _ROLE.sub(r"\1", text)).replace("``", "`")


class CommandParser(ShortErrors, ArgumentParser):
    """The parser of commands without Lightning."""


def command_parser(command: str, description: str) -> CommandParser:
    """Return a parser with ``--config``."""
    parser = CommandParser(prog=f"mrlm {command}", description=description, allow_abbrev=False)
    parser.add_argument("--config", action=ActionConfigFile, help="YAML file with any of the options.")
    return parser


class PlainParser(argparse.ArgumentParser):
    """The parser of commands without classes and files: mistakes raise :class:`ConfigurationError`."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"mrlm {command}", description=description, allow_abbrev=False)

    def format_help(self) -> str:
        """Return the help in plain words."""
        return plain_words(super().format_help())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the options; a misspelled one is named before those that are missing."""
        for word in itertools.takewhile(lambda word: word != "--", args or ()):
            if word.startswith("--") and word.partition("=")[0] not in _options(self):
                self.error(f"unrecognized arguments: {word}")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise a short message.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(explain(message, self))


def check_needed(options: Any, parser: CommandParser | PlainParser, needed: Mapping[str, Sequence[str]]) -> None:
    """Validate that no option was given that does nothing without others.

    Args:
        options: all options of the command.
        parser: parser of the options.
        needed: for the name of an option, names of others, one of which must be given.

    Raises:
        ConfigurationError: an option differs from its default, and none of those others was given.
    """
    for name, others in needed.items():
        value = getattr(options, name)
        if value != parser.get_default(name) and not any(getattr(options, other) for other in others):
            fault = f"{name}: {value!r} does nothing without {' or '.join(others)}"
            raise ConfigurationError(f"{fault}; leave it out, or give `--{others[0]} ...`")


def explain(message: str, parser: Any) -> str:
    """Return a short form of the parser library's message.

    Args:
        message: message of the library; a tree if a value may have several types.
        parser: parser whose options are compared with an unknown one.
    """
    if short := _explain_unrecognized(message, parser) or _explain_unaccepted(message, parser):
        return short
    if choice := _CHOICE.match(message):
        option, value, choices = choice.groups()
        names = [name.strip("'") for name in choices.split(", ")]
        hint = f"; did you mean {near!r}?" if (near := nearest(value, names)) else ""
        return f"{option}: expected one of {', '.join(map(repr, names))}, but the value is {value!r}{hint}"
    if kind := _KIND.match(message):
        return f"{kind[1]}: expected {KINDS[int]}, but the value is {kind[3]!r}"
    if item := _ITEM.match(message):
        key, reason = item.groups()
        value = reason.rpartition(": ")[2].strip("'")
        return f"{key}: {plain_reason(reason, value)}"
    if required := re.match(r"the following arguments are required: (.+)", message):
        keys = required[1].split(", ")
        words, _, bases, _ = _PARSED.get(((), {}, {}, ""))
        files = " and ".join(map(str, config_files(words)))
        lacking = f"{', '.join(keys)} missing{files and f' in {files}'}"
        if isinstance(parser, PlainParser):
            return f"{lacking}; see `{parser.prog} --help`"
        remedy = f"give `{' '.join(f'--{key} VALUE' for key in keys)}`, or a file that has it with `--config FILE`"
        if len(keys) == 1 and keys[0] in bases:
            import_exports()
            remedy = f"{unknown_name('', [bases[keys[0]]])}; {remedy}"
        return f"{lacking}; {remedy}"
    return " ".join(_OPTION_VALUE.sub(r"\1:", message).split())


def _option_mistake(message: str, parser: Any, words: Sequence[str]) -> MistakeError | None:
    """Return the mistake in the value of an option that belongs to no group."""
    match = _OPTION_VALUE.match(message)
    key = match[1] if match else ""
    for action in parser._actions:
        values = [value for option, value in option_values(words) if option in action.option_strings]
        if action.dest == key and values and hasattr(action, "_typehint"):
            try:
                value = resolve(load_value(values[-1], get_loader("yaml")), action._typehint, key)
                if action.nargs == "+" and isinstance(value, list):
                    return MistakeError(key, f"{value} is one word; give its values as words, as in `--{key} A B`")
                return find_mistake(value, action._typehint, key) or find_mistake(values[-1], action._typehint, key)
            except MistakeError as mistake:
                return mistake
    return None


def _explain_unrecognized(message: str, parser: Any) -> str | None:
    match = re.match(r"unrecognized arguments: (.+)", message, re.DOTALL)
    if not match:
        return None
    words = match.group(1).split()
    option_names = [option[2:] for option in _options(parser)]
    options = [word.split("=")[0] for word in words if word.startswith("-")]
    if not options and "config" in option_names and words[0].endswith((".yaml", ".yml")):
        return f"unexpected argument {words[0]!r}; did you mean `--config {words[0]}`?"
    if not options:
        return f"{words[0]!r} is not expected here; values follow an option, as in `--option VALUE`"
    near = _meant_option(options[0].strip("-+"), option_names)
    return f"there is no option {options[0]!r}" + (f"; did you mean '--{near}'?" if near else "; see `--help`")


def _unaccepted_key(message: str) -> str:
    """Return the key of a file that the parser does not know, if the message is about one, else an empty text."""
    match = _UNACCEPTED.search(message)
    return ".".join(filter(None, match.groups())) if match else ""


def _explain_unaccepted(message: str, parser: Any) -> str | None:
    key = _unaccepted_key(message)
    command = parser.prog.partition(" ")[2]
    if not key:
        return None
    option_names = {option.lstrip("-") for option in _options(parser)}
    groups = {key.split(".")[0] for key in option_names}
    group = key.split(".")[0]
    # A wrong group would pull the comparison of whole keys towards keys that look alike by chance.
    meant = _meant_option(group, groups) if group not in groups else nearest(key, option_names)
    hint = f"did you mean {meant!r}?" if meant else f"see `{parser.prog} --help`"
    return f"{command} has no key {key!r}; {hint}"


def _meant_option(name: str, known: Collection[str]) -> str | None:
    """Return the known option that is most likely meant, or the setting of a run with this last name or synonym."""
    if longer := next((option for option in known if option.startswith(f"{name}_")), None):
        return longer
    synonym = SYNONYMS.get(name)
    if "trainer" in known and synonym not in known:
        model = _PARSED.get(((), {}, {}, ""))[1].get("model")
        allowed = accepted_arguments(imported(model[CLASS])) if isinstance(model, Mapping) and CLASS in model else None
        options = (option[2:] for option in training_options())
        candidates = [option.split(".") for option in options if option.rpartition(".")[2] in (name, synonym)]
        fitting = [option for option in candidates if allowed is None or option[0] != "model" or option[1] in allowed]
        if candidates:
            return ".".join((fitting or candidates)[0])
    longer_names = [option[2:] for option in training_options()] if "trainer" in known else []
    last = nearest(name.rpartition(".")[2], [option.rpartition(".")[2] for option in longer_names])
    return nearest(name, [*known, *(option for option in longer_names if option.rpartition(".")[2] == last)])


def _options(parser: Any) -> list[str]:
    """Return all long options of a parser."""
    return [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
