"""Write the options in the pages of ``docs/algorithms`` from the classes: ``python -m docs.options``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from mrlm_pl import algorithms
from mrlm_pl.learner.policies.distillation import Distillation, Teacher
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.settings import ranges_of

FOLDER = Path(__file__).parent / "algorithms"
INDEX = FOLDER / "README.md"
COMMON = FOLDER / "options.md"
MARKS = ("<!-- options: python -m docs.options -->\n", "<!-- end of options -->\n")

SHARED = ("policies", "seats", "optimization", "distillation", "settings")
"""Documented options that the pages leave to docs/algorithms/options.md."""

PARTS: dict[type, dict[str, type]] = {
    algorithms.OnPolicyDistillation: {"setting of `distillation`": Distillation, "setting of a teacher": Teacher}
}
"""Classes of values that an algorithm alone needs, by the title of their table."""

PLACES = {
    "TreeCredit": "[turn trees](../training/teams.md#turn-trees)",
    "TurnBaseline": "[credit of turns](credit_of_turns.md)",
    "TurnCredit": "[credit of turns](credit_of_turns.md)",
    "Absence": "[absent agents](ccpo.md#replays-without-an-agent)",
    "Rest": "[absent agents](ccpo.md#replays-without-an-agent)",
    "Reduction": "[options](options.md)",
    "PolicyGradient": "[options](options.md)",
}
"""Pages of names that docstrings refer to, other than algorithms."""


def classes() -> dict[str, type]:
    """Return the algorithms by the name of their file."""
    found = (getattr(algorithms, name) for name in algorithms.__all__)
    return {cls.__module__.rpartition(".")[2]: cls for cls in found}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with its current options."""
    yield COMMON, shared()
    for stem, cls in classes().items():
        yield FOLDER / f"{stem}.md", options(cls)


def shared() -> str:
    """Return the options of all policy gradients with their defaults, as a configuration."""
    found = inspect.signature(PolicyGradient).parameters.items()
    lines = [f"    {name}: {value(item.default, whole=True)}\n" for name, item in found if name not in SHARED[:2]]
    return "".join(["```yaml\nmodel:\n  class_path: GRPO\n  init_args:\n", *lines, "```\n"])


def options(cls: type) -> str:
    """Return the options that a class adds to the shared ones, and a link to those."""
    tables = [table("option", cls), *(table(title, part) for title, part in PARTS.get(cls, {}).items())]
    gradient = issubclass(cls, PolicyGradient)
    link = "[Shared options](options.md)" if gradient else "Also `policies` and `optimization`"
    links = f"{link}, [your model](README.md#your-model-and-data)\n"
    return "\n".join([*filter(None, tables), links])


def table(title: str, cls: type) -> str:
    """Return a table of the options in a class's docstring, with their ranges, without the shared options."""
    bases = reversed([base for base in cls.__mro__ if "__init__" in vars(base)])
    found = {name: item for base in bases for name, item in inspect.signature(base).parameters.items()}
    rows, ranges = [], ranges_of(cls)
    for names, meaning in described(cls):
        shown = [
            f"`{name}: {value(found[name].default)}`"
            + (f" ({ranges[name].removeprefix('from ').removesuffix(' and finite')})" if name in ranges else "")
            for name in names
            if name not in SHARED
        ]
        if shown:
            rows.append(f"| {', '.join(shown)} | {meaning} |\n")
    return "".join([f"| {title} | meaning |\n|---|---|\n", *rows]) if rows else ""


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


def value(default: object, whole: bool = False) -> str:
    """Return a default as in a configuration.

    Args:
        default: a value of an option.
        whole: show all fields of a data class, not those alone that differ from its own defaults.

    >>> value(None), value(True), value(0.95), value("turn"), value((0.9, 0.999))
    ('null', 'true', '0.95', 'turn', '[0.9, 0.999]')
    """
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        given = {field.name: getattr(default, field.name) for field in dataclasses.fields(default)}
        plain = {} if whole else {field.name: field.default for field in dataclasses.fields(default)}
        shown = [f"{name}: {value(item)}" for name, item in given.items() if plain.get(name, given) != item]
        return f"{{{', '.join(shown)}}}"
    if isinstance(default, tuple):
        return f"[{', '.join(map(value, default))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(default), str(default))


def with_options(page: str, text: str) -> str:
    """Return a page with these options."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: f"\n{text}\n", page, flags=re.DOTALL)


if __name__ == "__main__":
    for path, found in pages():
        path.write_text(with_options(path.read_text(encoding="utf-8"), found), encoding="utf-8")
