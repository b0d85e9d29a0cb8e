"""Small classes by seed: a running total with methods, properties and static methods to write, and their tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

CLASS = "Tally"
TESTS = 3
MAX_METHODS = 8
MAX_DRAWS = 100


@dataclass(frozen=True)
class _Method:
    """A method with room for a number ``{a}``: its head's decorator and arguments, description and body.

    Tests compare ``used``, of an object ``tally`` and a number ``x``, and for a change also ``tally.total``.
    """

    name: str
    description: str
    body: Sequence[str]
    used: str
    arguments: str = "self"
    decorator: str = ""
    changes: bool = False

    def lines(self, number: int, *, written: bool) -> list[str]:
        body = [line.format(a=number) for line in self.body] if written else []
        described = [f'"""{self.description.format(a=number)}"""']
        head = [self.decorator] if self.decorator else []
        return [*head, f"def {self.name}({self.arguments}):", *(f"    {line}" for line in (body or described))]


_LISTED = yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text(encoding="utf-8"))
_METHODS = [_Method(**method) for method in _LISTED]


def generate_class(rng: Random, methods: tuple[int, int]) -> Mapping[str, Any]:
    """Return a task's data: a class with methods to write, of a number in this range, its tests and its solution."""
    chosen = [(method, rng.randint(2, 9)) for method in rng.sample(_METHODS, rng.randint(*methods))]
    skeleton, solution = (_source(chosen, written=written) for written in (False, True))
    return {
        "skeleton": skeleton, "class": CLASS, "methods": [method.name for method, _ in chosen],
        "tests": _tests(rng, chosen, solution), "context": "", "solution": solution,
    }  # fmt: skip


def _source(chosen: list[tuple[_Method, int]], *, written: bool) -> str:
    parts = [["def __init__(self, total):", "    self.total = total"]]
    parts += [method.lines(number, written=written) for method, number in chosen]
    return "\n\n".join([f"class {CLASS}:", *("\n".join(f"    {line}" for line in part) for part in parts)]) + "\n"


def _tests(rng: Random, chosen: list[tuple[_Method, int]], solution: str) -> str:
    namespace: dict[str, Any] = {}
    exec(solution, namespace)  # of this module's own making
    lines = ["import unittest"]
    for method, _ in chosen:
        lines += ["", "", f"class {CLASS}Test{method.name.capitalize()}(unittest.TestCase):"]
        for number, (total, x, value, after) in enumerate(_examples(rng, method, namespace), start=1):
            lines += [
                f"    def test_{method.name}_{number}(self):",
                f"        tally, x = {CLASS}({total}), {x}",
                f"        self.assertEqual({method.used}, {value})",
                *([f"        self.assertEqual(tally.total, {after})"] if method.changes else []),
            ]
    return "\n".join(lines) + "\n"


def _examples(rng: Random, method: _Method, namespace: Mapping[str, Any]) -> list[tuple[int, int, int, int]]:
    """Return totals, arguments, values and totals afterwards that no constant agrees with."""
    for _ in range(MAX_DRAWS):
        found = []
        for _ in range(TESTS):
            total, x = rng.randint(-20, 20), rng.randint(-20, 20)
            names = {**namespace, "tally": namespace[CLASS](total), "x": x}
            found.append((total, x, eval(method.used, names), names["tally"].total))
        if len({value for _, _, value, _ in found}) > 1:
            return found
    raise AssertionError(f"no numbers tell {method.name} from a constant")
