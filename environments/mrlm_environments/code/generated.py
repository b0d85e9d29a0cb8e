"""Small programming tasks by seed: one function of one argument, described in a sentence, with hidden tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import yaml

CodeKind = Literal["number", "text", "list"]
MAX_DIFFICULTY = 3
TESTS = 5
MAX_DRAWS = 1000
ENTRY = "f"


@dataclass(frozen=True)
class _Rule:
    """A rule with room for a number ``{a}``: its description and its expression in ``x``."""

    description: str
    expression: str
    low: int = 2
    high: int = 99


_LISTED = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
_RULES = {kind: [_Rule(*rule) for rule in rules] for kind, rules in _LISTED.items()}
_STEPS = (("{b} times ({x})", "{b}*({x})"), ("({x}) plus {b}", "({x})+{b}"), ("({x}) minus {b}", "({x})-{b}"))
"""Second steps on a number ``{x}``: their descriptions and expressions."""

KINDS: tuple[CodeKind, ...] = ("number", "text", "list")


def generate_data(rng: Random, kinds: Sequence[CodeKind], difficulty: tuple[int, int]) -> Mapping[str, Any]:
    """Return a generated task's data, in the form of a row.

    Args:
        rng: source of all choices.
        kinds: kinds to choose from.
        difficulty: lowest and highest difficulty: 1 is one rule with a number below 10, 2 any number, 3 two steps.

    >>> task = generate_data(Random(1), ["number"], (1, 1))
    >>> task["prompt"], task["solution"]
    ('Write f(x) that returns x divided by 3, rounded down.', 'def f(x): return x//3')
    """
    kind, level = rng.choice(kinds), rng.randint(*difficulty)
    rule = rng.choice(_RULES[kind])
    number = rng.randint(rule.low, min(rule.high, 9) if level == 1 else rule.high)
    description, expression = rule.description.format(a=number), rule.expression.format(a=number)
    if level == MAX_DIFFICULTY:
        words, code = rng.choice(_STEPS)
        factor = rng.choice([value for value in range(2, 10) if value != number])  # (x+4)-4 would not be a task
        example = _value(expression, _argument(Random(0), kind))
        if isinstance(example, bool):
            description = f"{factor} if {description.removeprefix('whether ')}, else 0"
            expression = f"{factor} if {expression} else 0"
        elif isinstance(example, int):
            description, expression = words.format(x=description, b=factor), code.format(x=expression, b=factor)
        else:
            description, expression = f"the length of ({description})", f"len({expression})"
    return {
        "prompt": f"Write {ENTRY}(x) that returns {description}.",
        "given": "",
        "entry": ENTRY,
        "tests": _tests(rng, kind, number, expression),
        "solution": f"def {ENTRY}(x): return {expression}",
        "kind": kind,
        "difficulty": level,
    }


def _tests(rng: Random, kind: CodeKind, number: int, expression: str) -> list[str]:
    """Return tests that neither a constant function nor the identity passes, one of them where comparisons change."""
    edge: Any = {"number": number, "text": "abcdefghij"[:number], "list": [number - 1, number, number + 1]}[kind]
    for _ in range(MAX_DRAWS):
        arguments = [edge, *(_argument(rng, kind, near=number) for _ in range(TESTS - 1))]
        values = [_value(expression, argument) for argument in arguments]
        if arguments != values and any(value != values[0] for value in values):
            return [f"assert {ENTRY}(*{[x]!r}) == {y!r}" for x, y in zip(arguments, values, strict=True)]
    raise AssertionError(f"no arguments tell {expression} from a constant and from x")


def _argument(rng: Random, kind: CodeKind, near: int = 5) -> Any:
    if kind == "number":
        return rng.choice((rng.randint(-99, 99), near + rng.randint(-2, 2)))
    if kind == "text":
        return "".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 12)))
    return [rng.choice((rng.randint(-99, 99), near, near + rng.randint(-2, 2))) for _ in range(rng.randint(3, 8))]


def _value(expression: str, argument: Any) -> Any:
    """Return the value of an expression of this module's own making."""
    builtin_functions: dict[str, Callable[..., Any]] = {
        "abs": abs, "len": len, "max": max, "min": min, "sorted": sorted, "sum": sum,
    }  # fmt: skip
    return eval(expression, {"__builtins__": builtin_functions, "x": argument})
