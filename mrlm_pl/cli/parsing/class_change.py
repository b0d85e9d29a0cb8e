"""Notices the settings that are lost when a later file or option names another class than an earlier one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jsonargparse._typehints as jsonargparse_types
from jsonargparse import Namespace

from mrlm_pl.errors import ConfigurationError, nearest

OWN_PACKAGES = ("mrlm_pl.", "mrlm_environments.", "mrlm_callbacks.")
"""Packages whose classes a configuration may name without a path."""


@dataclass(frozen=True)
class LostSetting:
    """A setting given for the class ``old`` that the class ``new``, named later, does not accept.

    Args:
        old, new: class paths.
        key: of the setting.
        value: given for it.
        accepted: the keys of ``new``.
    """

    old: str
    new: str
    key: str
    value: Any
    accepted: tuple[str, ...]

    def explain(self, place: str) -> str:
        """What is lost and what to do; ``place`` is the key of the class."""
        old, new = (path.rsplit(".", 1)[1] for path in (self.old, self.new))
        key = f"{place}.{self.key}" if place else self.key
        if self.key in self.accepted:
            fault = f"{new} does not accept {_shown(self.value)}, which was set for {old}"
        else:
            near = nearest(self.key, self.accepted)
            accepted = f" (it accepts: {', '.join(self.accepted)})" if self.accepted else " (it has no settings)"
            hint = f" (did you mean {near!r}?)" if near else accepted
            fault = f"{new} has no {self.key!r}{hint}, which was set to {_shown(self.value)} for {old}"
        named = new if self.new.startswith(OWN_PACKAGES) else self.new  # other classes are found by their path alone
        option = f"--{place or 'KEY'} '{{class_path: {named}, init_args: {{}}}}'"
        return f"{key}: {fault}; remove it, or drop what {new} does not take of {old}'s settings with `{option}`"


@contextmanager
def lost_settings() -> Iterator[list[LostSetting]]:
    """While it is open, collect the settings that parsers discard because the class changed.

    The parser library discards them at debug level and offers no hook, so its function is replaced. A class that is
    named with ``init_args: {}`` discards on purpose.
    """
    library_discard = jsonargparse_types.discard_init_args_on_class_path_change
    lost: list[LostSetting] = []

    def discard(parser: Any, earlier: Any, value: Any) -> None:
        # Actions repeat on copies what the class's parser has done.
        if isinstance(parser, jsonargparse_types.ActionTypeHint) or not earlier or "init_args" not in earlier:
            library_discard(parser, earlier, value)
            return
        given = dict(earlier["init_args"].items(branches=True, nested=False))
        library_discard(parser, earlier, value)
        gone = [key for key in given if key not in earlier["init_args"]]
        if gone and ("init_args" not in value or value["init_args"]):
            lost.extend(_meant(earlier["class_path"], value["class_path"], {key: given[key] for key in gone}, parser))

    jsonargparse_types.discard_init_args_on_class_path_change = discard
    try:
        yield lost
    finally:
        jsonargparse_types.discard_init_args_on_class_path_change = library_discard


def _meant(old: str, new: str, gone: Mapping[str, Any], parser: Any) -> list[LostSetting]:
    """The discarded settings that differ from the old class's defaults, which a run's own ``config.yaml`` spells out.

    The others are named on stderr.
    """
    defaults = jsonargparse_types.ActionTypeHint.get_class_parser(old, {}).get_defaults()
    usual = [key for key, value in gone.items() if value == defaults.get(key)]
    if usual:
        names = [path.rsplit(".", 1)[1] for path in (new, old)]
        print(f"mrlm: {names[0]} does not take {', '.join(usual)}, left at {names[1]}'s defaults", file=sys.stderr)
    accepted = tuple(action.dest for action in parser._actions if not action.dest.endswith("help"))
    return [LostSetting(old, new, key, value, accepted) for key, value in gone.items() if key not in usual]


def _shown(value: Any) -> str:
    """The value in a message; of a class its name alone."""
    return str(value["class_path"]).rsplit(".", 1)[-1] if "class_path" in _keys(value) else repr(value)


def _keys(value: Any) -> Sequence[str]:
    return list(value.keys()) if isinstance(value, Namespace) else ()


def refuse_lost(lost: Sequence[LostSetting], parsed: Namespace) -> None:
    """Refuse a configuration that lost a setting.

    Raises:
        ConfigurationError: the first of ``lost``, with the key under which ``parsed`` has its class.
    """
    if lost:
        raise ConfigurationError(lost[0].explain(_place(lost[0].new, parsed)))


def _place(class_path: str, parsed: Namespace) -> str:
    """The key of the first value of that class, as an option has it; empty when a list holds it."""
    for key, value in parsed.items(branches=True):
        if key.endswith("class_path") and value == class_path:
            return option_key(key.removesuffix("class_path").removesuffix("."))
    return ""


def option_key(key: str) -> str:
    """A key of the parsed configuration as an option has it.

    >>> option_key("fit.data.init_args.environment")
    'data.environment'
    """
    skipped = ("init_args", "fit", "validate", "test", "predict")
    return ".".join(part for part in key.split(".") if part not in skipped)
