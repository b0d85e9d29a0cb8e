"""The grid of a sweep: values of options, their combinations, and a folder's name for each."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mrlm_pl.cli.parsing.config_files import with_underscores
from mrlm_pl.errors import ConfigurationError

LONGEST_NAME = 120


@dataclass(frozen=True)
class Cell:
    """A combination of the grid's values.

    Args:
        label: ``NAME=VALUE,...``; empty without a grid.
        settings: the keys and their values.
    """

    label: str
    settings: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """Return the label as a folder's name, with a hash where it is too long or has odd characters.

        >>> Cell("model=builtin_tiny", ()).name, Cell("model=builtin:tiny", ()).name
        ('model=builtin_tiny', 'model=builtin_tiny-d963bed5')
        """
        plain = re.sub(r"[^\w.=,+-]", "_", self.label, flags=re.ASCII)[:LONGEST_NAME]
        if plain == self.label:
            return plain
        return f"{plain}-{hashlib.sha256(json.dumps([self.label, self.settings]).encode()).hexdigest()[:8]}"

    @property
    def words(self) -> tuple[str, ...]:
        """Return the settings as options; values may begin with dashes."""
        return tuple(f"--{key}={value}" for key, value in self.settings)


def cells(items: Sequence[str]) -> Iterator[Cell]:
    """Yield all combinations of the grid's values.

    Args:
        items: ``KEY=VALUE,VALUE`` for each key.

    Raises:
        ConfigurationError: an item has another form, or a key or value is there twice.

    >>> [cell.label for cell in cells(["data.groups=2,4", "model.a.rate=1", "model.b.rate=2"])]
    ['groups=2,model.a.rate=1,model.b.rate=2', 'groups=4,model.a.rate=1,model.b.rate=2']
    """
    found = [_values(item) for item in items]
    keys = [key for key, _ in found]
    if double := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigurationError(f"grid: {double} is given twice; write all its values as {double}=A,B")
    short = [key.rpartition(".")[2] for key in keys]
    names = [name if short.count(name) == 1 else key for name, key in zip(short, keys, strict=True)]
    for cell in itertools.product(*(values for _, values in found)):
        label = ",".join(f"{name}={value}" for name, value in zip(names, cell, strict=True))
        yield Cell(label, tuple(zip(keys, cell, strict=True)))


def _values(item: str) -> tuple[str, list[str]]:
    """Return the key and the values of an item, as they are written.

    >>> _values("data.environment.difficulty=[1, 1],[1, 2]")
    ('data.environment.difficulty', ['[1, 1]', '[1, 2]'])
    """
    key, _, text = item.partition("=")
    values = _split(text)
    if not key or values is None or not all(values):
        raise ConfigurationError(
            f"grid: {item!r} must be KEY=VALUE,VALUE, as in model.policies.main.learning_rate=1e-4,1e-3"
        )
    (option,) = with_underscores([f"--{key}"])
    if double := next((value for value in values if values.count(value) > 1), None):
        raise ConfigurationError(f"grid: {option[2:]} has the value {double} twice; remove one")
    return option[2:], values


def _split(text: str) -> list[str] | None:
    """Return the parts between commas outside of brackets and quotes; None if one stays open.

    >>> _split('{qestion},"a, b",[1, 1],don\\'t'), _split("[1"), _split("1]")
    (['{qestion}', '"a, b"', '[1, 1]', "don't"], None, None)
    """
    parts, open_brackets, quote = [""], list[str](), ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'" and (not parts[-1].strip() or parts[-1].rstrip()[-1] in "[{,:"):
            quote = sign
        elif sign in "[{":
            open_brackets.append("]" if sign == "[" else "}")
        elif sign in "]}":
            if not open_brackets or open_brackets.pop() != sign:
                return None
        elif sign == "," and not open_brackets:
            parts.append("")
            continue
        parts[-1] += sign
    return None if quote or open_brackets else [part.strip() for part in parts]
