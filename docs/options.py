"""Write the options of each page in ``docs/algorithms`` from the algorithm's class: ``python -m docs.options``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from mrlm_pl import algorithms
from mrlm_pl.learner.policy_gradient import PolicyGradient

FOLDER = Path(__file__).parent / "algorithms"
MARKS = ("<!-- options: python -m docs.options -->\n", "<!-- end of options -->\n")

SHARED = ("policies", "seats", "optimization", "distillation", "settings")
"""Documented options that the pages leave to docs/algorithms.md."""

PLACES = {
    "TreeCredit": "[turn trees](../teams.md#turn-trees)",
    "TurnBaseline": "[credit of turns](../algorithms.md#credit-of-turns)",
    "TurnCredit": "[credit of turns](../algorithms.md#credit-of-turns)",
    "Absence": "[absent agents](ccpo.md#replays-without-an-agent)",
    "Rest": "[absent agents](ccpo.md#replays-without-an-agent)",
    "Reduction": "[options](../algorithms.md#options)",
    "PolicyGradient": "[options](../algorithms.md#options)",
}
"""Pages of names that docstrings refer to, other than algorithms."""


def classes() -> dict[str, type]:
    """Return the algorithms by the name of their file."""
    found = (getattr(algorithms, name) for name in algorithms.__all__)
    return {cls.__module__.rpartition(".")[2]: cls for cls in found}


def table(cls: type) -> str:
    """Return the options that a class adds to the shared ones, and a link to those."""
    bases = reversed([base for base in cls.__mro__ if "__init__" in vars(base)])
    options = {name: item for base in bases for name, item in inspect.signature(base).parameters.items()}
    rows = []
    for names, meaning in described(cls):
        shown = [f"`{name}: {value(options[name].default)}`" for name in names if name not in SHARED]
        if shown:
            rows.append(f"| {', '.join(shown)} | {meaning} |\n")
    gradient = issubclass(cls, PolicyGradient)
    shared = "[Shared options](../algorithms.md#options)" if gradient else "Also `policies` and `optimization`"
    tail = f"{shared} · [shared metrics](../algorithms.md#metrics)\n"
    return "".join(["| option | meaning |\n|---|---|\n", *rows, "\n", tail]) if rows else tail


def described(cls: type) -> Iterator[tuple[list[str], str]]:
    """Yield the names and the text of each entry of a class's ``Args``, in Markdown."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=    \w)", f"\n{section}")[1:]:
        names, _, text = " ".join(entry.split()).partition(": ")
        yield names.split(", "), markdown(text)


def markdown(text: str) -> str:
    """Return the text of a docstring in Markdown, its references as links.

    >>> markdown("see :class:`~mrlm_pl.algorithms.ppo.PPO`; None has ``own`` alone.")
    'see [PPO](ppo.md); null has `own` alone.'
    """
    pages = {cls.__name__: f"[{cls.__name__}]({stem}.md)" for stem, cls in classes().items()} | PLACES
    linked = re.sub(
        r":\w+:`~?(?:[\w.]*\.)?(\w+)`", lambda match: pages.get(match.group(1), f"`{match.group(1)}`"), text
    )
    return re.sub(r"\bNone\b", "null", linked).replace("``", "`").replace("|", "\\|")


def value(default: object) -> str:
    """Return a default as in a configuration.

    >>> value(None), value(True), value(0.95), value("turn")
    ('null', 'true', '0.95', 'turn')
    """
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = dataclasses.fields(default)
        set_ones = [field.name for field in fields if getattr(default, field.name) != field.default]
        return f"{{{', '.join(f'{name}: {value(getattr(default, name))}' for name in set_ones)}}}"
    return {"None": "null", "True": "true", "False": "false", "()": "[]"}.get(str(default), str(default))


def with_options(page: str, cls: type) -> str:
    """Return a page with the current table of its class."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: f"\n{table(cls)}\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    for stem, algorithm in classes().items():
        path = FOLDER / f"{stem}.md"
        path.write_text(with_options(path.read_text(encoding="utf-8"), algorithm), encoding="utf-8")
