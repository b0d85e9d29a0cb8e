"""Problems that need tools: generated ones of three kinds, and rows of a data set."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, Literal

import msgspec

from mrlm_environments.toolbox.search import EMBEDDED_CORPUS
from mrlm_pl.environment.rows import read_rows
from mrlm_pl.environment.tools import written_call
from mrlm_pl.errors import DataError

Kind = Literal["arithmetic", "lookup", "files"]
REQUIRED_TOOLS: dict[Kind, tuple[str, ...]] = {
    "arithmetic": ("calculator",),
    "lookup": ("web_search", "calculator"),
    "files": ("file_system",),
}
KINDS: tuple[Kind, ...] = tuple(REQUIRED_TOOLS)
_NAMES = ("prices", "points", "weights", "visits", "lengths", "orders", "ages", "scores")


class _Row(msgspec.Struct):
    question: str
    answer: str | int | float
    required_tools: list[str] | None = None
    files: dict[str, str | None] | None = None  # parquet gives each row the paths of all


def generate_problem(rng: Random, kinds: Sequence[Kind]) -> dict[str, Any]:
    """Return data of a task: question, answer, required_tools, files, expected_files, kind and gold.

    ``gold`` are the replies that earn the most: the calls in one reply, then the answer.

    Args:
        rng: source of all draws.
        kinds: kinds to choose from: ``arithmetic`` is a product too long for the head, ``lookup`` needs two facts of
            the embedded corpus, ``files`` sums the numbers of a file into another one.
    """
    kind = rng.choice(kinds)
    data = {"files": {}, "expected_files": {}, **_MAKERS[kind](rng)}
    calls = "".join(written_call(tool, **arguments) for tool, arguments in data.pop("calls"))
    gold = [calls, f"<answer>{data['answer']}</answer>"]
    return {**data, "kind": kind, "required_tools": list(REQUIRED_TOOLS[kind]), "gold": gold}


def data_problem(row: Mapping[str, Any], tools: Collection[str]) -> dict[str, Any]:
    """Return a task's data from a row with ``question``, ``answer`` and, optionally, ``required_tools`` and ``files``.

    Args:
        row: the row.
        tools: names of the tools that the agent has.

    Raises:
        ValidationError: a field has another type than it must have.
        DataError: the question or the answer is empty, or a required tool is not among the tools.
    """
    given = msgspec.convert(row, _Row)
    answer = str(given.answer).strip()
    if not given.question.strip() or not answer:
        raise DataError(f"question is {given.question!r:.80} and answer {given.answer!r:.80}; neither may be empty")
    required = sorted(set(given.required_tools or ()))
    files = {path: content for path, content in (given.files or {}).items() if content is not None}
    needed = {*required, *(("file_system",) if files else ())}
    if absent := sorted(needed - set(tools)):
        raise DataError(
            f"required_tools and files need {', '.join(absent)}, and the tools are {', '.join(sorted(tools))}; add it "
            "to `tools`"
        )
    gold = None if required else [f"<answer>{answer}</answer>"]
    return {"question": given.question, "answer": answer, "required_tools": required, "files": files, "gold": gold}


def _arithmetic(rng: Random) -> dict[str, Any]:
    a, b, c = rng.randint(101, 999), rng.randint(12, 99), rng.randint(2, 999)
    expression, value = rng.choice(
        (
            (f"{a}*{b}", a * b),
            (f"{a}*{b}+{c}", a * b + c),
            (f"{a}*{b}-{c}", a * b - c),
            (f"({a}+{c})*{b}", (a + c) * b),
        )
    )
    calls = [("calculator", {"expression": expression})]
    return {"question": f"{expression}=?", "answer": str(value), "calls": calls}


def _lookup(rng: Random) -> dict[str, Any]:
    # The larger one first, so that no question is another one the other way round.
    low, high = sorted(rng.sample(_facts(), 2), key=lambda fact: (fact[1], fact[0]))
    sign, words = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times")))
    expression = f"{high[1]}{sign}{low[1]}"
    value = {"+": high[1] + low[1], "-": high[1] - low[1], "*": high[1] * low[1]}[sign]
    calls = [
        ("web_search", {"query": high[0]}),
        ("web_search", {"query": low[0]}),
        ("calculator", {"expression": expression}),
    ]
    return {"question": f"What is {high[0]} {words} {low[0]}?", "answer": str(value), "calls": calls}


def _files(rng: Random) -> dict[str, Any]:
    source = f"{rng.choice(_NAMES)}{rng.randint(100, 999)}.txt"
    numbers = [rng.randint(10, 999) for _ in range(rng.randint(4, 8))]
    total = str(sum(numbers))
    calls = [
        ("file_system", {"operation": "read", "path": source}),
        ("file_system", {"operation": "write", "path": "sum.txt", "content": total}),
    ]
    return {
        "question": f"Write the sum of the numbers in the file {source} to the file sum.txt. What is the sum?",
        "answer": total,
        "files": {source: "".join(f"{number}\n" for number in numbers)},
        "expected_files": {"sum.txt": total},
        "calls": calls,
    }


_MAKERS: dict[Kind, Callable[[Random], dict[str, Any]]] = {
    "arithmetic": _arithmetic,
    "lookup": _lookup,
    "files": _files,
}


@cache
def _facts() -> Sequence[tuple[str, int]]:
    rows = read_rows(str(EMBEDDED_CORPUS), None, ("facts",))
    return [(fact["what"], fact["value"]) for row in rows for fact in row["facts"]]
